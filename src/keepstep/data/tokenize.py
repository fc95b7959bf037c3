"""Text to token ids: any tokenizer.json, and a byte-level BPE of our own where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""All bytes and the end-of-text token."""


def train_bpe(texts: Iterable[str], vocab: int, path: Path, *, special: Sequence[str] = (END_OF_TEXT,)) -> int:
    """Train a byte-level BPE, write it as a tokenizer.json, and say how many tokens it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 256 + len(special):
        raise DataError(
            f"a vocabulary of {vocab} is too small for a byte-level BPE",
            f"it needs at least {256 + len(special)}: every byte and {len(special)} special token(s)",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_atomic(path, tokenizer.to_str())
    size: int = tokenizer.get_vocab_size()
    return size


def load(path: Path) -> Any:
    """A Hugging Face `tokenizers.Tokenizer` from a tokenizer.json."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise DataError(f"tokenizer {path} is missing", "give the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot parse
        raise DataError(f"{path} is not a tokenizer.json: {error}", "export it with tokenizer.save(path)") from error


def special_id(tokenizer: Any, text: str, path: Path) -> int:
    """The id of one special token, by its text."""
    number: int | None = tokenizer.token_to_id(text)
    if number is None:
        raise DataError(f"{path} has no token {text!r}", "name one of its special tokens")
    return number


def encode_documents(
    tokenizer: Any, texts: Iterable[str], *, eos: int | None, batch: int = 256
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Encode in batches: all ids of a batch one after the other, and each document's length, eos counted."""
    end = [] if eos is None else [eos]
    for group in _batches(texts, batch):
        encodings = tokenizer.encode_batch_fast(group, add_special_tokens=False)
        ids = [[*encoding.ids, *end] for encoding in encodings]
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        yield np.fromiter((one for document in ids for one in document), np.int32, int(lengths.sum())), lengths


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
