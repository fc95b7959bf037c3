"""Compressed MDS shards: unpacked once, to the size their index gives and not a byte more."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError
from keepstep.data.formats.mds import ShardEntry
from keepstep.data.remote import digest_file

_BLOCK_BYTES = 1 << 20


def unpack_shard(zipped: Path, entry: ShardEntry, folder: Path) -> Path:
    """The unpacked copy of a shard, whole or absent."""
    status = zipped.stat() if zipped.is_file() else None
    if status is None:
        raise DataError(f"{zipped} is missing", "copy the shard again")
    key = f"{zipped.resolve()} {status.st_size} {entry.bytes} {sorted(entry.hashes.items())}"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.mds"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _unpack(zipped, entry, aside)
        for name, expected in entry.hashes.items():
            if digest_file(aside, name) not in (None, expected):
                raise DataError(f"{zipped} unpacks to another {name} than its index says", "copy the shard again")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _unpack(zipped: Path, entry: ShardEntry, aside: Path) -> None:
    written = 0
    try:
        with zipped.open("rb") as raw, _reader(raw, entry.compression, zipped) as source, aside.open("wb") as target:
            while block := source.read(_BLOCK_BYTES):
                written += len(block)
                if written > entry.bytes:
                    break
                target.write(block)
    except (EOFError, OSError, ValueError) as error:
        raise DataError(f"{zipped} cannot be unpacked: {error}", "the shard is damaged: copy it again") from error
    if written != entry.bytes:
        more = "more than " if written > entry.bytes else f"{written:,} instead of "
        raise DataError(f"{zipped} unpacks to {more}{entry.bytes:,} bytes", "the shard is damaged: copy it again")


def _reader(raw: Any, compression: str, path: Path) -> Any:
    match compression.split(":")[0]:
        case "gz":
            return gzip.GzipFile(fileobj=raw)
        case "zstd":
            import zstandard

            return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw, read_across_frames=True)
    raise DataError(f"{path} is compressed with {compression}", "gz and zstd are read; write the data again with one")
