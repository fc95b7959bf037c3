"""The demo corpus: the sources of Python's own standard library, which every machine has without a download."""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import write_json
from keepstep.core.units import format_bytes
from keepstep.core.verbosity import progress
from keepstep.data import tokenization
from keepstep.data.cache_folder import FACTS, prepare_folder
from keepstep.data.formats.megatron import MegatronReader, MegatronWriter, token_dtype

HOLD_OUT_EVERY = 20
LARGEST_VOCAB = 8192
"""A corpus of this size fills no larger vocabulary."""
_COUNT_CHUNK = 1 << 22

_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
_VERSION = 1


def standard_library_files() -> list[Path]:
    """The .py files of the standard library without its tests, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def read_texts(paths: list[Path]) -> Iterator[str]:
    """Each file as one document; files that are empty or not UTF-8 are left out."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield text


def prepare_demo(cache_dir: Path, vocab: int) -> Path:
    """The folder with `train`, `valid`, tokenizer.json and facts.json, built at first use."""
    if vocab < tokenization.SMALLEST_VOCAB:
        raise DataError(
            f"model.vocab is {vocab}, too small for the demo's byte-level tokenizer",
            f"set model.vocab to at least {tokenization.SMALLEST_VOCAB}",
        )
    size = min(vocab, LARGEST_VOCAB)
    key = hashlib.sha256(f"{_VERSION} {sys.version} {size}".encode()).hexdigest()[:12]
    return prepare_folder(cache_dir / f"demo-{key}", lambda folder: _build_demo(folder, size))


def _build_demo(folder: Path, vocab: int) -> None:
    files = standard_library_files()
    if not files:
        raise DataError("this Python has no standard library sources", "point data.path at data of your own")
    size_bytes = sum(path.stat().st_size for path in files)
    progress(f"demo data: training a tokenizer on {len(files)} files, {format_bytes(size_bytes)}")
    path = folder / "tokenizer.json"
    size = tokenization.train_bpe(read_texts(files), vocab, path)
    encoder = tokenization.Encoder(path)
    eos = encoder.special(tokenization.END_OF_TEXT)
    progress(f"demo data: encoding with {size:,} tokens")
    encoder.prove(list(read_texts(files[:40])))
    dtype = token_dtype(size)
    with MegatronWriter(folder / "train", dtype) as train, MegatronWriter(folder / "valid", dtype) as valid:
        for number, text in enumerate(read_texts(files), start=1):
            tokens, _ = tokenization.add_ends(*encoder.encode([text]), None, eos, dtype)
            (valid if number % HOLD_OUT_EVERY == 0 else train).add(tokens)
    train_tokens, valid_tokens = MegatronReader(folder / "train").tokens, MegatronReader(folder / "valid").tokens
    facts: dict[str, Any] = {
        "documents": train.documents,
        "tokens": train.tokens,
        "valid_documents": valid.documents,
        "valid_tokens": valid.tokens,
        "text_bytes": size_bytes,
        "vocab": size,
        "unigram_perplexity": unigram_perplexity(train_tokens, valid_tokens, size),
    }
    write_json(folder / FACTS, facts)
    progress(f"demo data: {train.tokens:,} tokens to train on, {valid.tokens:,} held out")


def _token_counts(tokens: NDArray[Any], vocab: int) -> NDArray[np.int64]:
    """How often each id below `vocab` occurs, counted a chunk of the mapped file at a time."""
    counts = np.zeros(vocab, dtype=np.int64)
    for first in range(0, len(tokens), _COUNT_CHUNK):
        counts += np.bincount(np.asarray(tokens[first : first + _COUNT_CHUNK]).astype(np.int64), minlength=vocab)
    return counts


def unigram_perplexity(train: NDArray[Any], valid: NDArray[Any], vocab: int) -> float:
    """Perplexity on `valid` of a model that knows only how frequent each token is in `train` (add-one smoothing).

    A model that learnt anything about the order of tokens is below this.
    """
    expected, counts = _token_counts(valid, vocab), _token_counts(train, vocab)
    log_share = np.log(counts + 1.0) - math.log(float(counts.sum()) + len(counts))
    return float(np.exp(-(expected * log_share).sum() / max(1, int(expected.sum()))))
