"""Raw text as numbered tasks: which files there are, and how the work over them is cut.

The cut depends on the inputs alone, never on who works on them: that is what makes the output the same for any number
of workers. A file that can be entered anywhere (plain JSONL) is cut into byte ranges, Parquet into row groups; a
compressed or plain-text file stays whole.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keepstep.core.errors import DataError
from keepstep.data.stage_files import is_mark, is_stage, whole_files

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
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_md5")
_PLACES = 5
_PLACE_BYTES = 1 << 14

BUILD_STATE = ".keepstep"
"""The folder in which a build keeps what it knows about itself."""
DEDUP_REPORT = ".jsonl.report.json"
"""How the report beside a file of `data dedup` ends."""


@dataclass(frozen=True)
class SourceFile:
    """One input file, local or behind an fsspec address."""

    path: str
    size_bytes: int
    """-1 where a server does not say."""
    kind: Kind
    compression: str
    version: str = ""
    """What a store calls this content of the file; empty where it has no name for it."""


@dataclass(frozen=True)
class Piece:
    """A part of one file: bytes or, in a Parquet file, row groups [start, stop); up to its end where stop is -1."""

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
        candidates = whole_files(path) if is_stage(path) else _below(path)
    else:
        found = glob.glob(name, recursive=True)  # noqa: PTH207 - absolute patterns
        candidates = [Path(one) for one in found if not _is_ours(one)]
    for candidate in candidates:
        known = kind_of(candidate.name)
        if known is None and named:
            raise DataError(
                f"{candidate} is of no kind we read", "rename it to .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt"
            )
        if known is not None and candidate.is_file():
            yield SourceFile(str(candidate), candidate.stat().st_size, *known)


def _below(folder: Path) -> list[Path]:
    """Everything below a folder but what is hidden, and but what we wrote there ourselves: that is nobody's input."""
    everything = list(folder.rglob("*"))
    built = {one.parent for one in everything if one.name == BUILD_STATE} - {folder}
    return [
        one
        for one in everything
        if not any(part.startswith(".") for part in one.relative_to(folder).parts)
        and built.isdisjoint(one.parents)
        and not _is_ours(str(one))
    ]


def _is_ours(path: str) -> bool:
    """Whether a file is what a stage or `data dedup` says about its data."""
    return is_mark(path) or path.endswith(DEDUP_REPORT)


def _remote_files(name: str) -> Iterator[SourceFile]:
    if name.startswith("hf://"):
        from keepstep.data.hub import list_files

        for path, size_bytes in list_files(name):
            known = kind_of(path)
            if known is not None:
                yield SourceFile(path, size_bytes, *known)
        return
    from keepstep.data.remote import Retry, with_retry

    protocol = name.split("://", 1)[0]
    for found, facts in with_retry(name, lambda: _list_remote(name), Retry()).items():
        known = kind_of(found)
        if known is not None:
            address = found if "://" in found else f"{protocol}://{found}"
            size_bytes = facts.get("size")
            # Web servers that share an address may each have a tag of their own for the same file.
            keys = () if protocol in ("http", "https") else _VERSION_KEYS
            version = next((str(facts[key]) for key in keys if facts.get(key)), "")
            yield SourceFile(address, -1 if size_bytes is None else int(size_bytes), *known, version)


def _list_remote(name: str) -> dict[str, dict[str, Any]]:
    """What is known about each file behind an address or a pattern of addresses, by its path."""
    from keepstep.data.remote import filesystem

    system, path = filesystem(name)
    # A listing remembered from before would hide a file that has come since.
    system.invalidate_cache()
    if "*" in path:
        found: dict[str, dict[str, Any]] = system.glob(path, detail=True)
    else:
        facts = system.info(path)
        found = {path: facts} if facts["type"] == "file" else system.find(path, detail=True)
        # As in a folder here: what is hidden is nobody's input.
        found = {one: facts for one, facts in found.items() if "/." not in one.removeprefix(path)}
    found = {one: facts for one, facts in found.items() if one == path or not _is_ours(one)}
    # Pages of links tell no sizes.
    return {
        one: facts if facts.get("size") is not None else system.info(one)
        for one, facts in found.items()
        if facts["type"] == "file"
    }


def content_version(file: SourceFile) -> str:
    """A short name for what a file holds: the store's own, or a checksum of a few places of a local file.

    A copy has the same name as its original, on every machine; a small file never keeps its name when it is changed.
    """
    if "://" in file.path:
        return file.version
    digest = hashlib.sha256()
    with open_binary(file.path) as stream:
        last = max(0, file.size_bytes - _PLACE_BYTES)
        for place in sorted({last * number // (_PLACES - 1) for number in range(_PLACES)}):
            stream.seek(place)
            digest.update(stream.read(_PLACE_BYTES))
    return digest.hexdigest()[:16]


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
    if file.size_bytes < 0:
        yield Piece(file.path, file.kind, file.compression, 0, -1), 0
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
