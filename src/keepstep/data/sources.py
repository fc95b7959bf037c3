"""Raw text as numbered tasks: which files there are, and how the work over them is cut.

The cut depends on the inputs alone, never on who works on them: that is what makes the output the same for any number
of workers. A file that can be entered anywhere (plain JSONL) is cut into byte ranges, Parquet into row groups; a
compressed or plain-text file stays whole.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keepstep.core.errors import DataError

Kind = Literal["jsonl", "parquet", "text"]

_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
}
_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """One input file, local or behind an fsspec address."""

    path: str
    size_bytes: int
    kind: Kind
    compression: str


@dataclass(frozen=True)
class Piece:
    """A part of one file: bytes [start, stop), or row groups [start, stop) of a Parquet file."""

    path: str
    kind: Kind
    compression: str
    start: int
    stop: int


def kind_of(path: str) -> tuple[Kind, str] | None:
    """What a file holds, by its name; None when we cannot tell."""
    name = path.lower()
    compression = next((suffix for suffix in _COMPRESSIONS if name.endswith(suffix)), "")
    stem = name[: len(name) - len(compression)]
    kind = _SUFFIXES.get(stem[stem.rfind(".") :]) if "." in stem else None
    if kind is None or (compression and kind == "parquet"):
        return None
    return kind, compression


def find_files(inputs: Sequence[str]) -> list[SourceFile]:
    """Every input file behind paths, folders, patterns and addresses, in an order that does not depend on the disk."""
    found: list[SourceFile] = []
    for name in inputs:
        files = list(_remote_files(name) if "://" in name else _local_files(name))
        if not files:
            raise DataError(
                f"{name} matches no input file", "inputs are .jsonl[.gz|.zst], .parquet, .txt and .md files or folders"
            )
        found += sorted(files, key=lambda file: file.path)
    return found


def _local_files(name: str) -> Iterator[SourceFile]:
    path = Path(name)
    named = path.is_file()
    if named:
        candidates = [path]
    elif path.is_dir():
        candidates = [one for one in path.rglob("*") if not _is_hidden(one.relative_to(path))]
    else:
        candidates = [Path(one) for one in glob.glob(name, recursive=True)]  # noqa: PTH207 - absolute patterns
    for candidate in candidates:
        known = kind_of(candidate.name)
        if known is None and named:
            raise DataError(
                f"{candidate} is of no kind we read", "rename it to .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt"
            )
        if known is not None and candidate.is_file():
            yield SourceFile(str(candidate), candidate.stat().st_size, *known)


def _is_hidden(inside: Path) -> bool:
    """Whether a file, or a folder on the way to it, has a name with a dot before it."""
    return any(part.startswith(".") for part in inside.parts)


def _remote_files(name: str) -> Iterator[SourceFile]:
    if name.startswith("hf://"):
        from keepstep.data.hub import list_files

        for path, size_bytes in list_files(name):
            known = kind_of(path)
            if known is not None:
                yield SourceFile(path, size_bytes, *known)
        return
    from keepstep.data.remote import filesystem

    system, path = filesystem(name)
    protocol = name.split("://", 1)[0]
    for found in system.glob(path) if "*" in path else [path] if system.isfile(path) else system.find(path):
        known = kind_of(found)
        if known is not None:
            address = found if "://" in found else f"{protocol}://{found}"
            yield SourceFile(address, int(system.size(found) or 0), *known)


def cut_tasks(files: Sequence[SourceFile], task_bytes: int) -> list[list[Piece]]:
    """Tasks of about `task_bytes` of input each; small files share one, large ones are cut where that is possible."""
    tasks: list[list[Piece]] = []
    current: list[Piece] = []
    room = task_bytes
    for file in files:
        for piece, size_bytes in _cut_file(file, task_bytes):
            if current and size_bytes > room:
                tasks.append(current)
                current, room = [], task_bytes
            current.append(piece)
            room -= size_bytes
    return [*tasks, current] if current else tasks


def _cut_file(file: SourceFile, task_bytes: int) -> Iterator[tuple[Piece, int]]:
    if file.kind == "parquet":
        yield from _cut_parquet(file, task_bytes)
        return
    can_cut = file.kind == "jsonl" and not file.compression
    step = task_bytes if can_cut else max(1, file.size_bytes)
    for start in range(0, max(1, file.size_bytes), step):
        stop = min(start + step, file.size_bytes)
        yield Piece(file.path, file.kind, file.compression, start, stop), stop - start


def _cut_parquet(file: SourceFile, task_bytes: int) -> Iterator[tuple[Piece, int]]:
    if file.size_bytes <= task_bytes or file.path.startswith("hf://"):
        # A file on the Hub is fetched whole, so cutting it would fetch it many times.
        yield Piece(file.path, file.kind, "", 0, -1), file.size_bytes
        return
    groups = open_parquet(file.path).metadata.num_row_groups
    a_task = max(1, groups * task_bytes // file.size_bytes)
    for start in range(0, groups, a_task):
        stop = min(start + a_task, groups)
        yield Piece(file.path, file.kind, "", start, stop), file.size_bytes * (stop - start) // groups


def open_parquet(path: str) -> Any:
    """A `pyarrow.parquet.ParquetFile`, or an error that says what is missing or wrong."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError("reading Parquet needs pyarrow", "pip install 'keepstep[parquet]'") from error
    try:
        return parquet.ParquetFile(open_binary(path) if "://" in path else path)
    except Exception as error:  # pyarrow raises its own and plain OSError, depending on what is broken
        raise DataError(f"{path} is not a readable Parquet file: {error}", "copy or export it again") from error


def open_binary(path: str) -> Any:
    """A local or remote file as a binary stream."""
    try:
        if "://" in path:
            if path.startswith("hf://"):
                from keepstep.data.hub import fetch

                return Path(fetch(path)).open("rb")
            from keepstep.data.remote import filesystem

            system, name = filesystem(path)
            return system.open(name, "rb")
        return Path(path).open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", "check the path and its rights") from error
