"""One task of a build: read, filter, tokenise, write, publish, mark. Doing it twice gives the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import sync_folder, write_json
from keepstep.data.formats.build_folder import STATE
from keepstep.data.formats.mds_writer import TokenShardWriter
from keepstep.data.formats.megatron import DTYPES, MegatronWriter, bin_path, idx_path, token_dtype
from keepstep.data.prepare.filters import apply_filters
from keepstep.data.prepare.plan import BuildOptions, Plan, marker_path
from keepstep.data.prepare.records import BLOCK_BYTES, Rejects, read_documents
from keepstep.data.tokenization import Encoder, add_ends

FIRST_PROOF_CHARS = 1 << 16
"""Text on which each worker compares the fast encoder with the exact one before it uses it."""
PROOF_CHARS = 1 << 13
"""The same, at the start of each later task."""
_PROOF_DOCUMENTS = 8
_RECORDS_BEFORE_CHECK = 1000

Report = Callable[[int, int], None]
"""Called with the bytes of input (as stored on disk) read and the tokens written since the last call."""


class TaskRun:
    """One task: `write` fills a temporary folder, `publish` flushes its files, renames them and marks the task done.

    Two steps, because the second waits for the disk: a worker starts its next task meanwhile.
    """

    def __init__(self, folder: Path, plan: Plan, task: int, encoder: Encoder) -> None:
        self.task = task
        self._folder = folder
        self._pieces = plan.tasks[task]
        self._options = plan.options
        self._encoder = encoder
        self._temporary = folder / STATE / f"aside-{task:05d}.{socket.gethostname()}.{os.getpid()}"
        self._output: _MegatronOutput | _MdsOutput | None = None
        self._rejects = Rejects()
        self._dropped = Counter[str]()
        self._text_chars = 0
        self._read_bytes = 0
        """Input read and not reported yet."""

    def write(self, report: Report) -> None:
        """Read, tokenise and write everything."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        with self._cleaning_up():
            dtype = _dtype(self._options, self._encoder.vocab)
            kind = _MegatronOutput if self._options.format == "megatron" else _MdsOutput
            self._output = kind(self._temporary, self.task, self._options, dtype)
            self._write_documents(self._output, dtype, report)

    def publish(self) -> None:
        """Complete, flush and rename all files, then write the marker."""
        if self._output is None:
            return
        with self._cleaning_up():
            marker = self._marker(self._output)
            for file in marker["files"]:
                (self._temporary / file["name"]).replace(self._folder / file["name"])
            sync_folder(self._folder)
            write_json(marker_path(self._folder, self.task), marker)
        shutil.rmtree(self._temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        """Remove the temporary folder on failure; an error of the disk gets a hint."""
        try:
            yield
        except BaseException as error:
            if self._output is not None:
                self._output.abort()
                self._output = None
            shutil.rmtree(self._temporary, ignore_errors=True)
            if isinstance(error, FileNotFoundError) and marker_path(self._folder, self.task).exists():
                # Another worker did the same task, finished the build and removed our temporary folder.
                return
            # A broken pipe is not a disk error: the parent process is gone.
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | ConnectionError):
                raise DataError(
                    f"task {self.task} cannot be written to {self._folder}: {error.strerror or error}",
                    "free space or repair the disk, then start the same command again: finished tasks are kept",
                ) from error
            raise

    def _write_documents(self, output: _MegatronOutput | _MdsOutput, dtype: np.dtype[Any], report: Report) -> None:
        options, encoder = self._options, self._encoder
        bos = encoder.special(options.bos) if options.bos else None
        eos = encoder.special(options.eos) if options.eos else None
        proof_chars = PROOF_CHARS if encoder.proven else FIRST_PROOF_CHARS
        for texts in self._batches():
            if proof_chars:
                encoder.prove(proof_sample(texts, proof_chars))
                proof_chars = 0
            ids, lengths = encoder.encode(texts)
            self._text_chars += sum(map(len, texts))
            output.write(*add_ends(ids, lengths, bos, eos, dtype))
            report(self._read_bytes, len(ids))
            self._read_bytes = 0
            self._check_rejects(output.documents, at_end=False)
            if 0 < options.limit <= output.samples:
                break
        self._check_rejects(output.documents, at_end=True)

    def _batches(self) -> Iterator[list[str]]:
        """Documents of all pieces in batches of about a block of text."""
        filters = self._options.filters
        batch: list[str] = []
        size = 0
        for piece in self._pieces:
            for texts in read_documents(piece, self._options.records, self._rejects, self._count):
                kept = apply_filters(texts, filters, self._dropped) if filters.any else texts
                batch += kept
                size += sum(map(len, kept))
                if size >= BLOCK_BYTES // 2:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _count(self, read_bytes: int) -> None:
        self._read_bytes += read_bytes

    def _check_rejects(self, documents: int, *, at_end: bool) -> None:
        """Raise if too many records are bad. Records dropped by a filter count as good."""
        bad = self._rejects.total
        seen = bad + documents + self._dropped.total()
        if bad > self._options.max_reject_share * seen and (at_end or seen >= _RECORDS_BEFORE_CHECK):
            error = self._rejects.error(f"task {self.task}", seen)
            raise DataError(error.message, f"{error.hint}; or keepstep data build allows more with --max-reject-share")

    def _marker(self, output: _MegatronOutput | _MdsOutput) -> dict[str, Any]:
        """Close the files; returns the facts of the task."""
        found = output.finish()
        return {
            "task": self.task,
            "documents": output.documents,
            "tokens": output.tokens,
            "samples": output.samples,
            "largest_id": output.largest_id,
            "text_chars": self._text_chars,
            "rejects": dict(sorted(self._rejects.counts.items())),
            "reject_samples": self._rejects.samples,
            "dropped": dict(sorted(self._dropped.items())),
            **found,
        }


def proof_sample(texts: list[str], chars: int) -> list[str]:
    """The starts of a batch's first documents, `chars` characters in all: a comparison always costs the same."""
    chars_each = chars // min(_PROOF_DOCUMENTS, len(texts))
    sample = []
    for text in texts:
        sample.append(text[: min(chars, chars_each)])
        chars -= len(sample[-1])
        if chars <= 0:
            break
    return sample


def _dtype(options: BuildOptions, vocab: int) -> np.dtype[Any]:
    if options.dtype == "auto":
        return token_dtype(vocab) if options.format == "megatron" else DTYPES[4]
    if options.dtype == "uint16" and vocab > 1 << 16:
        raise DataError(f"--dtype uint16 cannot hold the tokenizer's {vocab:,} ids", "use int32")
    return DTYPES[8 if options.dtype == "uint16" else 4]


class _Written:
    """What a task has written so far."""

    documents = 0
    samples = 0
    tokens = 0
    largest_id = -1

    def _count(self, documents: int, samples: int, tokens: NDArray[Any]) -> None:
        self.documents += documents
        self.samples += samples
        self.tokens += tokens.size
        self.largest_id = max(self.largest_id, int(tokens.max()) if tokens.size else -1)


class _MegatronOutput(_Written):
    def __init__(self, folder: Path, task: int, options: BuildOptions, dtype: np.dtype[Any]) -> None:
        self._digest = hashlib.sha256()
        self._limit = options.limit
        self._writer = MegatronWriter(folder / f"{options.name}-{task:05d}_text_document", dtype)
        self.abort = self._writer.abort

    def write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append documents, up to the build's limit."""
        if self._limit:
            lengths = lengths[: self._limit - self.documents]
            tokens = tokens[: int(lengths.sum())]
        self._writer.add_many(tokens, lengths.astype(np.int32))
        self._digest.update(tokens.data)
        self._count(len(lengths), len(lengths), tokens)

    def finish(self) -> dict[str, Any]:
        """Close the files; returns the marker's facts about them."""
        self._writer.close()
        stream, index = bin_path(self._writer.prefix), idx_path(self._writer.prefix)
        raw = index.read_bytes()
        return {
            "files": [
                {"name": stream.name, "bytes": stream.stat().st_size, "sha256": self._digest.hexdigest()},
                {"name": index.name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()},
            ]
        }


class _MdsOutput(_Written):
    def __init__(self, folder: Path, task: int, options: BuildOptions, dtype: np.dtype[Any]) -> None:
        self._writer = TokenShardWriter(folder, f"shard.{task:05d}", dtype)
        self._concat = options.concat
        self._limit = options.limit or sys.maxsize
        self._rest: NDArray[Any] = np.empty(0, dtype)

    def write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append documents, up to the build's limit."""
        if self._concat:
            joined = np.concatenate([self._rest, tokens])
            rows = min(len(joined) // self._concat, self._limit - self.samples)
            written, self._rest = joined[: rows * self._concat], joined[rows * self._concat :]
            self._writer.add_rows(written.reshape(rows, self._concat))
            self._count(len(lengths), rows, written)
        else:
            ends = np.cumsum(lengths).tolist()
            for start, end in zip([0, *ends], ends, strict=False):
                if end > start and self.samples < self._limit:
                    self._writer.add(tokens[start:end])
                    self._count(1, 1, tokens[start:end])

    def abort(self) -> None:
        """Each shard is written in one go: nothing is open."""

    def finish(self) -> dict[str, Any]:
        """Close the files; returns the marker's facts about them."""
        self._writer.flush()
        entries = self._writer.entries
        files = [
            {"name": raw["basename"], "bytes": raw["bytes"], "sha256": raw["hashes"]["sha256"]}
            for raw in (entry["raw_data"] for entry in entries)
        ]
        return {"files": files, "shards": entries}
