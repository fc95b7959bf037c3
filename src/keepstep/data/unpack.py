"""Compressed MDS shards: unpacked once, to the size their index gives and not a byte more."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from keepstep.core.errors import DataError
from keepstep.data.formats.mds import ShardEntry
from keepstep.data.remote import digest_file, is_full

_BLOCK_BYTES = 1 << 20


def unpack(source: BinaryIO, where: str, entry: ShardEntry, target: Path) -> None:
    """Unpack a shard and hold it against its index."""
    written = 0
    try:
        with _reader(source, entry.compression, where) as unpacked, target.open("r+b") as file:
            while block := unpacked.read(_BLOCK_BYTES):
                written += len(block)
                if written > entry.bytes:
                    break
                file.write(block)
    except _damage() as error:
        if is_full(error):
            raise
        raise DataError(f"{where} cannot be unpacked: {error}", "the shard is damaged: copy it again") from error
    if written != entry.bytes:
        more = "more than " if written > entry.bytes else f"{written:,} instead of "
        raise DataError(f"{where} unpacks to {more}{entry.bytes:,} bytes", "the shard is damaged: copy it again")
    for name, expected in entry.hashes.items():
        if digest_file(target, name) not in (None, expected):
            raise DataError(f"{where} unpacks to another {name} than its index says", "copy the shard again")


def _damage() -> tuple[type[Exception], ...]:
    """What the readers raise on a damaged file."""
    import zstandard

    return EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError


def _reader(raw: BinaryIO, compression: str, where: str) -> Any:
    match compression.split(":")[0]:
        case "gz":
            return gzip.GzipFile(fileobj=raw)
        case "zstd":
            import zstandard

            return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw, read_across_frames=True)
    raise DataError(f"{where} is compressed with {compression}", "gz and zstd are read; write the data again with one")
