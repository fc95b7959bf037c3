"""Text to token ids: any tokenizer.json, and a byte-level BPE of our own where there is none."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic
from keepstep.core.threads import in_threads
from keepstep.data.fast import FastLoad

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
    # In a thread, as the library's code hears no Ctrl-C before it has done its work.
    in_threads(lambda read: tokenizer.train_from_iterator(read, trainer), [texts], 1)
    write_atomic(path, tokenizer.to_str())
    size: int = tokenizer.get_vocab_size()
    return size


def load(path: Path) -> Any:
    """A Hugging Face `tokenizers.Tokenizer` from a tokenizer.json, for texts of any length."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise DataError(f"tokenizer {path} is missing", "give the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot parse
        raise DataError(f"{path} is not a tokenizer.json: {error}", "export it with tokenizer.save(path)") from error
    # transformers saves how the tokenizer was last called: documents would be cut, or filled up, to some old length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def ids_below(tokenizer: Any) -> int:
    """All ids of a tokenizer are below this; some leave numbers out, so that it is not the number of its tokens."""
    known: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max(known.values(), default=-1) + 1


def special_id(tokenizer: Any, text: str, path: Path) -> int:
    """The id of one special token, by its text."""
    number: int | None = tokenizer.token_to_id(text)
    if number is None:
        raise DataError(f"{path} has no token {text!r}", "name one of its special tokens")
    return number


class Encoder:
    """Ids exactly as Hugging Face tokenizers gives them, by the fastest way that was proven to agree.

    fastokens is tried where it is installed: it must load the same file and agree on every sample it is shown.
    """

    def __init__(self, path: Path, *, fast: bool | FastLoad = True) -> None:
        """`fast` may be a load that was started earlier."""
        self.path = path
        self._loading = FastLoad(path) if fast is True else fast
        self._exact = load(path)
        self.proven = False
        """Whether `prove` has been asked at least once."""
        self.notice = ""
        """Why the fast path is not in use, once that is known."""

    @functools.cached_property
    def _fast(self) -> Any | None:
        """Asked for as late as possible: it may still be loading."""
        found = self._loading.result() if self._loading else None
        if self._loading and found is None:
            self.notice = "fastokens cannot be used with this tokenizer"
        self._loading = False
        return found

    def settle(self) -> None:
        """Wait for whatever is still loading: a forked process would wait for ever."""
        _ = self.vocab, self._fast

    @functools.cached_property
    def vocab(self) -> int:
        """Ids are below this."""
        return ids_below(self._exact)

    @property
    def is_fast(self) -> bool:
        """Whether the fast path is in use."""
        return self._fast is not None

    def special(self, text: str) -> int:
        """The id of one special token, by its text."""
        return special_id(self._exact, text, self.path)

    def prove(self, texts: Sequence[str]) -> bool:
        """Hold both ways against each other on `texts`; the fast one goes for good when a single id differs."""
        self.proven = True
        if not texts or not (self._loading or self.is_fast):
            return True
        # First, because the fast one may still be loading beside it.
        ids, lengths = self._encode_exact(texts)
        if self._fast is None:
            return True
        fast_ids, fast_lengths = self._encode_fast(texts)
        if np.array_equal(fast_ids, ids) and np.array_equal(fast_lengths, lengths):
            return True
        self._fast = None
        self.notice = "fastokens gave other ids than tokenizers on a sample"
        return False

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids of the texts one after the other, and how many each text has."""
        return self._encode_exact(texts) if self._fast is None else self._encode_fast(texts)

    def _encode_fast(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        assert self._fast is not None
        ids, offsets = self._fast.encode_batch_flat(list(texts))
        ends = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1]

    def _encode_exact(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        found = self._exact.encode_batch_fast(list(texts), add_special_tokens=False)
        parts = [np.array(encoding.ids, dtype=np.uint32) for encoding in found]
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths


def add_ends(
    ids: NDArray[np.uint32], lengths: NDArray[np.int64], bos: int | None, eos: int | None, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Put bos before and eos after each document, and cast to the type on disk."""
    before = [] if bos is None else [np.array([bos], np.uint32)]
    after = [] if eos is None else [np.array([eos], np.uint32)]
    if not before and not after:
        return ids.astype(dtype), lengths
    ends = np.cumsum(lengths).tolist()
    parts: list[NDArray[np.uint32]] = []
    start = 0
    for end in ends:
        parts += before
        parts.append(ids[start:end])
        parts += after
        start = end
    joined = np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.empty(0, dtype)
    return joined, lengths + (len(before) + len(after))
