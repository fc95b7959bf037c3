"""Text to token ids: encode with any tokenizer.json, or train a byte-level BPE."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic
from keepstep.core.threads import in_threads
from keepstep.data.fast_tokenizer import FastLoad

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""All bytes and the end-of-text token."""
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip
"""Files that may belong to a tokenizer."""
MAKES_TOKENIZER_JSON = "transformers makes a tokenizer.json: AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)"
"""The remedy for models that have a tokenizer.model, or vocab.json and merges.txt, alone."""


def train_bpe(texts: Iterable[str], vocab: int, path: Path, *, special: Sequence[str] = (END_OF_TEXT,)) -> int:
    """Train a byte-level BPE and write it as a tokenizer.json; returns the number of its tokens."""
    from tokenizers import pre_tokenizers

    if vocab < 256 + len(special):
        raise DataError(
            f"a vocabulary of {vocab} is too small for a byte-level BPE",
            f"it needs at least {256 + len(special)}: every byte and {len(special)} special token(s)",
        )
    tokenizer = trained_bpe(texts, vocab, special, pre_tokenizers.ByteLevel(add_prefix_space=False))
    write_atomic(path, tokenizer.to_str())
    size: int = tokenizer.get_vocab_size()
    return size


def trained_bpe(texts: Iterable[str], vocab: int, special: Sequence[str], pre_tokenizer: Any) -> Any:
    """A byte-level BPE as a `tokenizers.Tokenizer`, trained on texts that `pre_tokenizer` splits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    # In a thread, because the library does not react to Ctrl-C before it has finished.
    in_threads(lambda read: tokenizer.train_from_iterator(read, trainer), [texts], 1)
    return tokenizer


def named_tokenizer(name: str) -> Path | None:
    """The path that `data.tokenizer` names, None where it names none; an error where no such file exists."""
    path = tokenizer_file(name) if name else None
    if path and not path.is_file():
        hint = "give a tokenizer.json, a folder with one, or OWNER/NAME on the Hugging Face Hub"
        raise DataError(f"data.tokenizer is {name!r}, which is missing or has no tokenizer.json", hint)
    return path


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that a file, a folder or OWNER/NAME on the Hub names; one on the Hub is downloaded."""
    path = Path(name)
    if not path.exists():
        from keepstep.data.remote.hub import fetch_model, is_model_name

        path = fetch_model(name, FILES) if is_model_name(name) else path
    return path / "tokenizer.json" if path.is_dir() else path


def load(path: Path) -> Any:
    """A Hugging Face `tokenizers.Tokenizer` from a tokenizer.json, for texts of any length."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise DataError(f"tokenizer {path} is missing", "give the path of a tokenizer.json")
    return _parsed(Tokenizer.from_file, str(path), str(path))


def load_text(text: str, source: str) -> Any:
    """The same from the text of a tokenizer.json; `source` names it in errors."""
    from tokenizers import Tokenizer

    return _parsed(Tokenizer.from_str, text, source)


def _parsed(parse: Callable[[str], Any], given: str, source: str) -> Any:
    try:
        tokenizer = parse(given)
    except BaseException as error:  # a bare Exception for what it cannot parse; a panic in Rust is not even that
        if isinstance(error, KeyboardInterrupt | MemoryError):
            raise
        raise DataError(f"{source} is not a tokenizer.json: {error}", "export it with tokenizer.save(path)") from error
    # transformers saves the truncation and padding of the last call, which would apply to our documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def ids_below(tokenizer: Any) -> int:
    """The largest id plus 1; more than the number of tokens where a tokenizer leaves ids out."""
    known: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max(known.values(), default=-1) + 1


def special_id(tokenizer: Any, text: str, path: Path) -> int:
    """The id of one special token, by its text."""
    number: int | None = tokenizer.token_to_id(text)
    if number is None:
        raise DataError(f"{path} has no token {text!r}", "name one of its special tokens")
    return number


class Encoder:
    """Encodes exactly as Hugging Face tokenizers does, with the fast encoder where it gives the same ids.

    fastokens is used if it is installed, loads the same file and agrees on every sample that it is compared on.
    """

    def __init__(self, path: Path, *, fast: bool | FastLoad = True) -> None:
        """`fast` may be a load that is already running."""
        self.path = path
        self._loading = FastLoad(path) if fast is True else fast
        self._exact = load(path)
        self.proven = False
        """Whether `prove` was called at least once."""
        self.notice = ""
        """Why the fast encoder is not used, once that is known."""

    @functools.cached_property
    def _fast(self) -> Any | None:
        """Requested as late as possible, because it may still be loading."""
        found = self._loading.result() if self._loading else None
        if self._loading and found is None:
            self.notice = "fastokens cannot be used with this tokenizer"
        self._loading = False
        return found

    def finish_loading(self) -> None:
        """Wait for the loading thread: a forked process would wait for it forever."""
        _ = self.vocab, self._fast

    @functools.cached_property
    def vocab(self) -> int:
        """The largest id plus 1."""
        return ids_below(self._exact)

    @property
    def is_fast(self) -> bool:
        """Whether the fast encoder is used."""
        return self._fast is not None

    def special(self, text: str) -> int:
        """The id of one special token, by its text."""
        return special_id(self._exact, text, self.path)

    def prove(self, texts: Sequence[str]) -> bool:
        """Compare both encoders on `texts`; a single different id switches the fast one off for good."""
        self.proven = True
        if not texts or not (self._loading or self.is_fast):
            return True
        # The exact one first, because the fast one may still be loading.
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
        """The ids of all texts, concatenated, and the length of each text."""
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
    bounds = pairwise([0, *np.cumsum(lengths).tolist()])
    parts = [part for start, end in bounds for part in (*before, ids[start:end], *after)]
    joined = np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.empty(0, dtype)
    return joined, lengths + (len(before) + len(after))
