"""The demo corpus: the Python standard library's own sources, on every machine that can run us, no download."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError
from keepstep.core.files import sync_file, sync_folder, write_json
from keepstep.core.units import format_bytes
from keepstep.data import tokenize
from keepstep.data.formats.megatron import MegatronReader, MegatronWriter, token_dtype
from keepstep.data.stats import unigram_perplexity

HOLD_OUT_EVERY = 20
LARGEST_VOCAB = 8192
"""A corpus of this size fills no larger vocabulary."""
FACTS = "facts.json"

_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
_VERSION = 1


def standard_library_files() -> list[Path]:
    """The .py files of the standard library without its tests, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def read_texts(paths: list[Path]) -> Iterator[str]:
    """Each file as one document; files that are empty or not UTF-8 are no text."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield text


def prepare_demo(cache_dir: Path, vocab: int) -> Path:
    """The folder with `train`, `valid`, tokenizer.json and facts.json, made at first use."""
    if vocab < tokenize.SMALLEST_VOCAB:
        raise DataError(
            f"model.vocab is {vocab}, too small for the demo's byte-level tokenizer",
            f"set model.vocab to at least {tokenize.SMALLEST_VOCAB}",
        )
    size = min(vocab, LARGEST_VOCAB)
    key = hashlib.sha256(f"{_VERSION} {sys.version} {size}".encode()).hexdigest()[:12]
    return prepare_folder(cache_dir / f"demo-{key}", lambda folder: _build_demo(folder, size))


def _build_demo(folder: Path, vocab: int) -> None:
    files = standard_library_files()
    if not files:
        raise DataError("this Python has no standard library sources", "point data.path at data of your own")
    size_bytes = sum(path.stat().st_size for path in files)
    print(f"demo data: training a tokenizer on {len(files)} files, {format_bytes(size_bytes)}", file=sys.stderr)
    path = folder / "tokenizer.json"
    size = tokenize.train_bpe(read_texts(files), vocab, path)
    encoder = tokenize.Encoder(path)
    eos = encoder.special(tokenize.END_OF_TEXT)
    print(f"demo data: encoding with {size:,} tokens", file=sys.stderr)
    encoder.prove(list(read_texts(files[:40])))
    seen = 0
    with (
        MegatronWriter(folder / "train", token_dtype(size)) as train,
        MegatronWriter(folder / "valid", token_dtype(size)) as valid,
    ):
        for text in read_texts(files):
            ids, lengths = encoder.encode([text])
            seen += 1
            (valid if seen % HOLD_OUT_EVERY == 0 else train).add(
                tokenize.add_ends(ids, lengths, None, eos, token_dtype(size))[0]
            )
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
    print(f"demo data: {train.tokens:,} tokens to train on, {valid.tokens:,} held out", file=sys.stderr)


def read_facts(folder: Path) -> dict[str, Any]:
    """What is known about prepared data; empty when nobody wrote it down."""
    path = folder / FACTS
    if not path.is_file():
        return {}
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def prepare_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build `folder` once, whoever asks: aside first, then renamed, so that it is whole or absent.

    The lock spares a second process the work; the rename alone keeps it correct, even where locks do not reach.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock") as alone:
        if folder.is_dir():
            return folder
        if alone:
            for leftover in folder.parent.glob(f".{folder.name}.*.aside"):
                shutil.rmtree(leftover, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".aside", dir=folder.parent))
        try:
            build(aside)
            aside.chmod(0o755)
            # On the disk first: after a power cut empty files would pass for what was prepared, for good.
            for path in aside.rglob("*"):
                (sync_folder if path.is_dir() else sync_file)(path)
            sync_folder(aside)
            _rename(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)
    return folder


def _rename(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        # Somebody beyond the lock's reach was faster: theirs holds the same bytes.
        if not folder.is_dir():
            raise


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a file lock, which the kernel drops when we die; yields False where the file system has no locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(handle)
