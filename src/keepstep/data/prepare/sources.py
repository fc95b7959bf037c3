"""Raw text as numbered tasks: find the input files and split the work over them.

The split depends on the inputs alone, so the output is the same for any number of workers. Plain JSONL can be read from
any byte and is split into byte ranges, Parquet into row groups. Compressed, CSV and plain-text files are not split.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keepstep.core.errors import DataError
from keepstep.data.formats.build_folder import STATE
from keepstep.data.prepare.stage_files import complete_files, is_stage, is_stage_marker
from keepstep.data.remote.files import filesystem, is_remote, with_retry
from keepstep.data.remote.hub import fetch, list_files

Kind = Literal["jsonl", "parquet", "csv", "text"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv"),
    "text": (".txt", ".text", ".md", ".rst", ".py"),
}
_COMPRESSIONS = (".gz", ".zst")
SUPPORTED = ".jsonl, .json, .csv, .tsv, .txt, .md (each also .gz or .zst) and .parquet"
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_md5")
_PLACES = 5
_PLACE_BYTES = 1 << 14

_DEDUP_REPORT = ".jsonl.report.json"
"""Name ending of the report that `data dedup` writes next to its output."""


@dataclass(frozen=True)
class SourceFile:
    """One input file, local or behind an fsspec address."""

    path: str
    size_bytes: int
    """-1 where a server does not report it."""
    kind: Kind
    compression: str
    version: str = ""
    """The store's version of the file, such as its ETag; empty where it has none."""


@dataclass(frozen=True)
class Piece:
    """A part of one file: bytes or, for Parquet, row groups [start, stop). A stop of -1 is the end of the file."""

    path: str
    kind: Kind
    compression: str
    start: int
    stop: int


def kind_of(path: str) -> tuple[Kind, str] | None:
    """Kind and compression of a file by its name; None for an unknown name."""
    name = path.lower()
    compression = next((suffix for suffix in _COMPRESSIONS if name.endswith(suffix)), "")
    stem = name[: len(name) - len(compression)]
    kind = next((kind for kind, suffixes in _SUFFIXES.items() if stem.endswith(suffixes)), None)
    if kind is None or (compression and kind == "parquet"):
        return None
    return kind, compression


def find_files(inputs: Sequence[str]) -> list[SourceFile]:
    """Every input file of paths, folders, patterns and addresses, in an order that does not depend on the disk."""
    found: list[SourceFile] = []
    for name in inputs:
        files = list(_remote_files(name) if is_remote(name) else _local_files(name))
        if not files:
            raise DataError(f"{name} matches no input file", f"inputs are files or folders of {SUPPORTED}")
        found += sorted(files, key=lambda file: file.path)
    return found


def _local_files(name: str) -> Iterator[SourceFile]:
    path = Path(name)
    named = path.is_file()
    if named:
        candidates = [path]
    elif path.is_dir():
        candidates = complete_files(path) if is_stage(path) else _files_below(path)
    else:
        found = glob.glob(name, recursive=True)  # noqa: PTH207 - absolute patterns
        candidates = [Path(one) for one in found if not _is_own_file(one)]
    for candidate in candidates:
        known = kind_of(candidate.name)
        if known is None and named:
            raise DataError(f"{candidate} has an unsupported file type", f"convert it to one of {SUPPORTED}")
        if known is not None and candidate.is_file():
            yield SourceFile(str(candidate), candidate.stat().st_size, *known)


def _files_below(folder: Path) -> list[Path]:
    """Everything below a folder except hidden files and the output of our own builds and stages."""
    everything = list(folder.rglob("*"))
    built = {one.parent for one in everything if one.name == STATE} - {folder}
    return [
        one
        for one in everything
        if not any(part.startswith(".") for part in one.relative_to(folder).parts)
        and built.isdisjoint(one.parents)
        and not _is_own_file(str(one))
    ]


def _is_own_file(path: str) -> bool:
    """Whether a file is a stage's plan or marker, or the report of `data dedup`."""
    return is_stage_marker(path) or path.endswith(_DEDUP_REPORT)


def _remote_files(name: str) -> Iterator[SourceFile]:
    if name.startswith("hf://"):
        for path, size_bytes in list_files(name):
            known = kind_of(path)
            if known is not None:
                yield SourceFile(path, size_bytes, *known)
        return
    protocol = name.split("://", 1)[0]
    for found, facts in with_retry(name, lambda: _list_remote(name)).items():
        known = kind_of(found)
        if known is not None:
            address = found if "://" in found else f"{protocol}://{found}"
            size = -1 if facts.get("size") is None else int(facts["size"])
            # Web servers behind one address may each report another tag for the same file.
            keys = () if protocol in ("http", "https") else _VERSION_KEYS
            version = next((str(facts[key]) for key in keys if facts.get(key)), "")
            yield SourceFile(address, size, *known, version)


def _list_remote(name: str) -> dict[str, dict[str, Any]]:
    """Facts about each file of an address or a pattern of addresses, by its path."""
    system, path = filesystem(name)
    # A cached listing would hide files that were added since.
    system.invalidate_cache()
    if "*" in path:
        found: dict[str, dict[str, Any]] = system.glob(path, detail=True)
    else:
        facts = system.info(path)
        found = {path: facts} if facts["type"] == "file" else system.find(path, detail=True)
        # As in a local folder, hidden files are not input.
        found = {one: facts for one, facts in found.items() if "/." not in one.removeprefix(path)}
    found = {one: facts for one, facts in found.items() if one == path or not _is_own_file(one)}
    # An HTML page of links has no sizes.
    return {
        one: facts if facts.get("size") is not None else system.info(one)
        for one, facts in found.items()
        if facts["type"] == "file"
    }


def content_version(file: SourceFile) -> str:
    """A short version of a file's content: the store's own, or a checksum over a few parts of a local file.

    A copy has the version of its original on every machine. Any change to a small file changes its version.
    """
    if is_remote(file.path):
        return file.version
    digest = hashlib.sha256()
    with open_binary(file.path) as stream:
        last = max(0, file.size_bytes - _PLACE_BYTES)
        for place in sorted({last * number // (_PLACES - 1) for number in range(_PLACES)}):
            stream.seek(place)
            digest.update(stream.read(_PLACE_BYTES))
    return digest.hexdigest()[:16]


def split_tasks(files: Sequence[SourceFile], task_bytes: int) -> list[list[Piece]]:
    """Tasks of about `task_bytes` of input each; small files share a task, large ones are split where possible."""
    tasks: list[list[Piece]] = []
    current: list[Piece] = []
    room = task_bytes
    for file in files:
        for piece, size_bytes in _split_file(file, task_bytes):
            if current and size_bytes > room:
                tasks.append(current)
                current, room = [], task_bytes
            current.append(piece)
            room -= size_bytes
    return [*tasks, current] if current else tasks


def _split_file(file: SourceFile, task_bytes: int) -> Iterator[tuple[Piece, int]]:
    if file.kind == "parquet":
        yield from _split_parquet(file, task_bytes)
        return
    if file.size_bytes < 0:
        yield Piece(file.path, file.kind, file.compression, 0, -1), 0
        return
    can_split = file.kind == "jsonl" and not file.compression
    step = task_bytes if can_split else max(1, file.size_bytes)
    for start in range(0, max(1, file.size_bytes), step):
        stop = min(start + step, file.size_bytes)
        yield Piece(file.path, file.kind, file.compression, start, stop), stop - start


def _split_parquet(file: SourceFile, task_bytes: int) -> Iterator[tuple[Piece, int]]:
    if file.size_bytes <= task_bytes or file.path.startswith("hf://"):
        # A file on the Hub is always fetched completely, so splitting it would fetch it many times.
        yield Piece(file.path, file.kind, "", 0, -1), file.size_bytes
        return
    groups = open_parquet(file.path).metadata.num_row_groups
    a_task = max(1, groups * task_bytes // file.size_bytes)
    for start in range(0, groups, a_task):
        stop = min(start + a_task, groups)
        yield Piece(file.path, file.kind, "", start, stop), file.size_bytes * (stop - start) // groups


def open_parquet(path: str) -> Any:
    """A `pyarrow.parquet.ParquetFile`, or an error that names what is missing or wrong."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError("reading Parquet needs pyarrow", "pip install 'keepstep[parquet]'") from error
    try:
        return parquet.ParquetFile(open_binary(path) if is_remote(path) else path)
    except Exception as error:  # pyarrow raises its own and plain OSError, depending on what is broken
        raise DataError(f"{path} is not a readable Parquet file: {error}", "copy or export it again") from error


def open_binary(path: str) -> Any:
    """A local or remote file as a binary stream."""
    try:
        local = fetch(path) if path.startswith("hf://") else path
        if not is_remote(local):
            return Path(local).open("rb")
        system, name = filesystem(path)
        return system.open(name, "rb")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions"
        ) from error
