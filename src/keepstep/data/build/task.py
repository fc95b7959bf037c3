"""One task of a build: read, filter, tokenise, write aside, publish, mark. Doing it twice gives the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import sync_folder, write_json
from keepstep.data.build.plan import STATE, BuildOptions, marker_path
from keepstep.data.filters import keep
from keepstep.data.formats.mds import TokenShardWriter
from keepstep.data.formats.megatron import DTYPES, MegatronWriter, bin_path, idx_path, token_dtype
from keepstep.data.records import BLOCK_BYTES, Rejects, read_documents
from keepstep.data.sources import Piece
from keepstep.data.tokenize import Encoder, add_ends

FIRST_PROOF_CHARS = 1 << 16
"""Text on which each worker holds the fast encoder against the exact one before it uses it."""
PROOF_CHARS = 1 << 13
"""The same, at the start of each later task."""
_PROOF_DOCUMENTS = 8
_RECORDS_BEFORE_JUDGING = 1000

Report = Callable[[int, int], None]
"""Called with bytes of input read, as it lies on its disk, and tokens written since the last call."""


class _Output(Protocol):
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def samples(self) -> int: ...

    def write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> bool:
        """Append documents; False when the build's limit is reached."""

    def finish(self) -> dict[str, Any]:
        """Close the files; what the marker has to know about them."""

    def abort(self) -> None:
        """Close what is open; the folder is about to go."""


class TaskRun:
    """One task: `write` puts its files aside, `publish` makes them last, moves them to their place and marks it done.

    Two steps, because the second waits for the disk: a worker begins its next task meanwhile.
    """

    def __init__(self, folder: Path, task: int) -> None:
        self.task = task
        self._folder = folder
        self._aside = folder / STATE / f"aside-{task:05d}.{socket.gethostname()}.{os.getpid()}"
        self._job: _Job | None = None

    def write(self, pieces: list[Piece], options: BuildOptions, encoder: Encoder, report: Report) -> None:
        """Read, tokenise and write everything."""
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        with self._guarded():
            dtype = _dtype(options, encoder.vocab)
            kind = _MegatronOutput if options.format == "megatron" else _MdsOutput
            job = _Job(self.task, pieces, options, encoder, kind(self._aside, self.task, options, dtype), dtype)
            try:
                job.run(report)
            except BaseException:
                job.output.abort()
                raise
            self._job = job

    def publish(self) -> None:
        """All files are whole, on the disk and in their place before the marker exists."""
        if self._job is None:
            return
        with self._guarded():
            try:
                marker = self._job.finish()
            except BaseException:
                self._job.output.abort()
                raise
            for file in marker["files"]:
                (self._aside / file["name"]).replace(self._folder / file["name"])
            sync_folder(self._folder)
            write_json(marker_path(self._folder, self.task), marker)
        shutil.rmtree(self._aside, ignore_errors=True)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Leave nothing aside when it fails, and say what to do about a disk."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self._aside, ignore_errors=True)
            if isinstance(error, FileNotFoundError) and marker_path(self._folder, self.task).exists():
                # Another worker did the same task, finished the build and cleared what it did not need.
                return
            # A broken pipe is no disk: whoever we report to is gone.
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | ConnectionError):
                raise DataError(
                    f"task {self.task} cannot be written to {self._folder}: {error.strerror or error}",
                    "make room or mend the disk, then start the same command again: finished tasks are kept",
                ) from error
            raise


@dataclass
class _Job:
    """What one task carries through its loop."""

    task: int
    pieces: list[Piece]
    options: BuildOptions
    encoder: Encoder
    output: _Output
    dtype: np.dtype[Any]
    rejects: Rejects = field(default_factory=Rejects)
    dropped: Counter[str] = field(default_factory=Counter)
    text_chars: int = 0
    read_bytes: int = 0
    """Input read and not reported yet."""

    def run(self, report: Report) -> None:
        """Read, tokenise and write everything."""
        options, encoder = self.options, self.encoder
        bos = encoder.special(options.bos) if options.bos else None
        eos = encoder.special(options.eos) if options.eos else None
        proof_chars = PROOF_CHARS if encoder.proven else FIRST_PROOF_CHARS
        for texts in self._batches():
            if proof_chars:
                encoder.prove(proof_sample(texts, proof_chars))
                proof_chars = 0
            ids, lengths = encoder.encode(texts)
            self.text_chars += sum(map(len, texts))
            wants_more = self.output.write(*add_ends(ids, lengths, bos, eos, self.dtype))
            report(self.read_bytes, len(ids))
            self.read_bytes = 0
            self._judge(at_end=False)
            if not wants_more:
                break
        self._judge(at_end=True)

    def _batches(self) -> Iterator[list[str]]:
        """Documents of all pieces, many small ones together and never much more than a block of text."""
        filters = self.options.filters
        waiting: list[str] = []
        size = 0
        for piece in self.pieces:
            for texts in read_documents(piece, self.options.records, self.rejects, self._count):
                kept = keep(texts, filters, self.dropped) if filters.any else texts
                waiting += kept
                size += sum(map(len, kept))
                if size >= BLOCK_BYTES // 2:
                    yield waiting
                    waiting, size = [], 0
        if waiting:
            yield waiting

    def _count(self, read_bytes: int) -> None:
        self.read_bytes += read_bytes

    def _judge(self, *, at_end: bool) -> None:
        """Stop at too many bad records. What a filter dropped was a sound one."""
        sound = self.output.documents + self.dropped.total()
        _judge(self.task, self.rejects, sound, self.options.max_reject_share, at_end=at_end)

    def finish(self) -> dict[str, Any]:
        """Close the files; what the marker says about the task."""
        found = self.output.finish()
        return {
            "task": self.task,
            "documents": self.output.documents,
            "tokens": self.output.tokens,
            "samples": self.output.samples,
            "text_chars": self.text_chars,
            "rejects": dict(sorted(self.rejects.counts.items())),
            "reject_samples": self.rejects.samples,
            "dropped": dict(sorted(self.dropped.items())),
            **found,
        }


def proof_sample(texts: list[str], chars: int) -> list[str]:
    """The heads of a batch's first documents, several where it has them, so that a proof costs the same everywhere."""
    chars_each = chars // min(_PROOF_DOCUMENTS, len(texts))
    sample = []
    for text in texts:
        sample.append(text[: min(chars, chars_each)])
        chars -= len(sample[-1])
        if chars <= 0:
            break
    return sample


def _judge(task: int, rejects: Rejects, sound: int, share: float, *, at_end: bool) -> None:
    seen = rejects.total + sound
    if rejects.total > share * seen and (at_end or seen >= _RECORDS_BEFORE_JUDGING):
        error = rejects.complaint(f"task {task}", seen)
        raise DataError(error.message, f"{error.hint}; or keepstep data build allows more with --max-reject-share")


def _dtype(options: BuildOptions, vocab: int) -> np.dtype[Any]:
    if options.dtype == "uint16" and vocab > 1 << 16:
        raise DataError(f"--dtype uint16 cannot hold the tokenizer's {vocab:,} ids", "use int32")
    match options.dtype:
        case "uint16":
            return DTYPES[8]
        case "int32":
            return DTYPES[4]
        case "auto":
            return token_dtype(vocab) if options.format == "megatron" else DTYPES[4]


class _MegatronOutput:
    def __init__(self, folder: Path, task: int, options: BuildOptions, dtype: np.dtype[Any]) -> None:
        self._digest = hashlib.sha256()
        self._limit = options.limit
        self._writer = MegatronWriter(folder / f"{options.name}-{task:05d}_text_document", dtype)

    @property
    def documents(self) -> int:
        return self._writer.documents

    @property
    def samples(self) -> int:
        return self._writer.documents

    @property
    def tokens(self) -> int:
        return self._writer.tokens

    def write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> bool:
        if self._limit and self.documents + len(lengths) > self._limit:
            lengths = lengths[: self._limit - self.documents]
            tokens = tokens[: int(lengths.sum())]
        self._writer.add_many(tokens, lengths.astype(np.int32))
        self._digest.update(tokens.data)
        return not self._limit or self.documents < self._limit

    def abort(self) -> None:
        self._writer.abort()

    def finish(self) -> dict[str, Any]:
        self._writer.close()
        stream, index = bin_path(self._writer.prefix), idx_path(self._writer.prefix)
        raw = index.read_bytes()
        return {
            "files": [
                {"name": stream.name, "bytes": stream.stat().st_size, "sha256": self._digest.hexdigest()},
                {"name": index.name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()},
            ]
        }


class _MdsOutput:
    def __init__(self, folder: Path, task: int, options: BuildOptions, dtype: np.dtype[Any]) -> None:
        self._writer = TokenShardWriter(folder, f"shard.{task:05d}", dtype)
        self._concat = options.concat
        self._limit = options.limit
        self._rest: NDArray[Any] = np.empty(0, dtype)
        self.documents = 0
        self.tokens = 0

    @property
    def samples(self) -> int:
        return self._writer.samples

    def write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> bool:
        room = self._limit - self.samples if self._limit else -1
        if self._concat:
            joined = np.concatenate([self._rest, tokens])
            rows = len(joined) // self._concat
            rows = min(rows, room) if room >= 0 else rows
            self._writer.add_rows(joined[: rows * self._concat].reshape(rows, self._concat))
            self._rest = joined[rows * self._concat :]
            self.tokens += rows * self._concat
            self.documents += len(lengths)
        else:
            ends = np.cumsum(lengths).tolist()
            for start, end in zip([0, *ends], ends, strict=False):
                if end > start and room != 0:
                    self._writer.add(tokens[start:end])
                    self.tokens += end - start
                    self.documents += 1
                    room -= 1
        return not self._limit or self.samples < self._limit

    def abort(self) -> None:
        """Shards are written whole: nothing is open."""

    def finish(self) -> dict[str, Any]:
        self._writer.flush()
        entries = self._writer.entries
        files = [
            {"name": raw["basename"], "bytes": raw["bytes"], "sha256": raw["hashes"]["sha256"]}
            for raw in (entry["raw_data"] for entry in entries)
        ]
        return {"files": files, "shards": entries}
