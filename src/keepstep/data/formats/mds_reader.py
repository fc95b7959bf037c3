"""Read MDS shards as mosaicml-streaming writes them.

A shard is: uint32 count, uint32 offsets[count + 1], the column config as JSON, the samples. The reader maps a shard and
checks all its offsets once, when it opens it. File names that lead out of the folder are refused.
"""

from __future__ import annotations

import functools
import gc
import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError, malformed_as
from keepstep.data.formats.mapped import map_file

INDEX = "index.json"
_LARGEST_INDEX_BYTES = 1 << 30
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names that need no further check: no folder, no leading dot."""
SHAPE_TYPES: tuple[np.dtype[Any], ...] = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))
"""Types of an array's shape, by their code in the array's header."""
_TOKEN_TYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
}


class ShardEntry(NamedTuple):
    """One checked entry of the index. A tuple, because an index of 10^12 tokens has hundreds of thousands of them."""

    basename: str
    bytes: int
    samples: int
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    hashes: dict[str, str]
    compression: str
    zip_basename: str
    zip_bytes: int
    zip_hashes: dict[str, str]


def parse_index(raw: bytes, where: str) -> list[ShardEntry]:
    """The shards of an index.json; a malformed entry is an error that names the shard."""
    if len(raw) > _LARGEST_INDEX_BYTES:
        raise DataError(f"{where} is {len(raw):,} bytes long", "no index is that large: the file is damaged")
    # orjson, because an index of 10^12 tokens has hundreds of thousands of entries.
    import orjson

    # The garbage collector would scan the growing heap again and again without finding anything to collect.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with malformed_as(DataError, f"{where} is not an MDS index", "the file is damaged: build or copy it again"):
            index = orjson.loads(raw)
            shards = index["shards"]
            if index["version"] != 2 or not isinstance(shards, list):
                raise ValueError("not version 2")
        columns: dict[Any, _Columns] = {}
        parsed = []
        # From the end, so that parsed entries are freed on the way.
        while shards:
            number = len(shards) - 1
            parsed.append(_parse_entry(shards.pop(), columns, where, number))
        return parsed[::-1]
    finally:
        if collecting:
            gc.enable()


_Columns = tuple[tuple[str, ...], tuple[str, ...], tuple[int | None, ...]]


def _parse_entry(entry: Any, columns: dict[Any, _Columns], where: str, number: int) -> ShardEntry:
    with malformed_as(DataError, f"{where} shard {number} is malformed", "build or copy the index again"):
        if entry["format"] != "mds" or entry["version"] != 2:
            raise ValueError(f"format {entry['format']} version {entry['version']}")
        raw, zipped = entry["raw_data"], entry.get("zip_data")
        written = (*entry["column_names"], None, *entry["column_encodings"], None, *entry["column_sizes"])
        # Shards of one data set have the same columns, so these are checked once and shared.
        known = columns.get(written)
        if known is None:
            known = columns[written] = _parse_columns(entry)
        parsed = ShardEntry(
            _safe_name(raw["basename"]),
            int(raw["bytes"]),
            int(entry["samples"]),
            *known,
            _parse_hashes(raw),
            str(entry.get("compression") or ""),
            _safe_name(zipped["basename"]) if zipped and zipped["basename"] else "",
            int(zipped["bytes"]) if zipped else 0,
            _parse_hashes(zipped) if zipped else {},
        )
        if not 0 <= parsed.samples < 1 << 32 or not 0 <= parsed.bytes < 1 << 32 or parsed.zip_bytes < 0:
            raise ValueError(f"{parsed.samples} samples in {parsed.bytes} bytes")
        if parsed.compression and not parsed.zip_basename:
            raise ValueError("compressed, but without zip_data")
        return parsed


def _parse_columns(entry: Any) -> _Columns:
    names = tuple(map(str, entry["column_names"]))
    encodings = tuple(map(str, entry["column_encodings"]))
    sizes = tuple(None if size is None else int(size) for size in entry["column_sizes"])
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError("its column lists differ in length")
    if any(size is not None and size < 0 for size in sizes):
        raise ValueError("a column of negative size")
    return names, encodings, sizes


def _parse_hashes(file: Any) -> dict[str, str]:
    hashes = file.get("hashes") or {}
    for value in hashes.values():
        if not isinstance(value, str):
            raise ValueError(f"its hash {value!r} is not text")
    return dict(hashes)


def _safe_name(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return name
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise ValueError(f"its file name {name!r} leads out of the folder")
    return name


class TokenShard:
    """One open shard: sample i's tokens as a view of the mapped file."""

    def __init__(self, path: Path, entry: ShardEntry, column: str) -> None:
        self._path = path
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} is missing", "copy the shard again, or run keepstep data verify") from error
        if size_bytes != entry.bytes:
            raise self._damaged(f"is {size_bytes:,} bytes long, its index says {entry.bytes:,}")
        self._raw = map_file(path)
        self._column, self._dtype, self._shaped = _find_column(entry, column, path)
        self._sizes = entry.column_sizes
        head = 4 + 4 * (entry.samples + 1)
        if size_bytes < head or int(self._raw[:4].view("<u4")[0]) != entry.samples:
            raise self._damaged(f"does not hold the {entry.samples:,} samples its index says")
        # A view of the file: copies for thousands of open shards would take gigabytes in each process.
        self._offsets = self._raw[4:head].view("<u4")
        sizes = np.diff(self._offsets.astype(np.int64))
        if self._offsets[0] < head or self._offsets[-1] > size_bytes or np.any(sizes < 0):
            raise self._damaged("has sample offsets outside the file")
        equal = len(sizes) > 0 and len(self._sizes) == 1 and bool(np.all(sizes == sizes[0]))
        self.width = len(self.tokens(0)) if equal else 0
        """Tokens of every sample if all have the same number and no other column, else 0."""
        self.sample_bytes = int(sizes[0]) if len(sizes) else 0
        """Bytes of the first sample."""

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self._path} {what}", "the shard is damaged: copy it again, or run keepstep data verify")

    @functools.cached_property
    def table(self) -> NDArray[Any]:
        """A shard of equal samples as one view of the file, one sample a row. All have the size of the first, so its
        header holds for all."""
        step = self.sample_bytes
        start = int(self._offsets[1]) - self.width * self._dtype.itemsize
        shape, strides = (len(self._offsets) - 1, self.width), (step, self._dtype.itemsize)
        return np.ndarray(shape, self._dtype, self._raw.data, start, strides)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every sample."""
        samples = len(self._offsets) - 1
        if self.width:
            return np.full(samples, self.width, dtype=np.int64)
        return np.fromiter((len(self.tokens(sample)) for sample in range(samples)), np.int64, samples)

    def tokens(self, sample: int) -> NDArray[Any]:
        """The tokens of one sample."""
        body = self._raw[int(self._offsets[sample]) : int(self._offsets[sample + 1])]
        cursor = 4 * sum(size is None for size in self._sizes)
        sizes, used = body[:cursor].tobytes(), 0
        for number, size in enumerate(self._sizes):
            if size is None:
                length = int.from_bytes(sizes[used : used + 4], "little")
                used += 4
            else:
                length = size
            if cursor + length > len(body):
                raise self._damaged(f"has a column that ends after sample {sample}")
            if number == self._column:
                return self._decode(body[cursor : cursor + length], sample)
            cursor += length
        raise AssertionError("the column was found when the shard was opened")

    def _decode(self, data: NDArray[np.uint8], sample: int) -> NDArray[Any]:
        if self._shaped:
            if not len(data):
                raise self._damaged(f"has an empty array in sample {sample}")
            rank, code = int(data[0]) >> 2, int(data[0]) & 3
            skip = 1 + rank * SHAPE_TYPES[code].itemsize
            if rank != 1 or skip > len(data):
                raise self._damaged(f"has an array of rank {rank} in sample {sample}, tokens have rank 1")
            count = int.from_bytes(data[1:skip].tobytes(), "little")
            if count * self._dtype.itemsize != len(data) - skip:
                raise self._damaged(f"claims {count:,} tokens in sample {sample} but holds other bytes")
            data = data[skip:]
        if len(data) % self._dtype.itemsize:
            raise self._damaged(f"holds no whole number of {self._dtype.name} in sample {sample}")
        return np.frombuffer(data.data, dtype=self._dtype)


def _find_column(entry: ShardEntry, column: str, path: Path) -> tuple[int, np.dtype[Any], bool]:
    """The column's number, its token type, and whether each sample stores its own shape."""
    if column not in entry.column_names:
        raise DataError(f"{path} has no column {column!r}", f"its columns are {', '.join(entry.column_names)}")
    number = entry.column_names.index(column)
    encoding = entry.column_encodings[number]
    match encoding.split(":"):
        case ["ndarray", name] if name in _TOKEN_TYPES:
            return number, _TOKEN_TYPES[name], True
        case ["ndarray", name, shape] if name in _TOKEN_TYPES and shape.isdigit():
            return number, _TOKEN_TYPES[name], False
        case ["bytes"]:
            # Older llm-foundry stored raw int64 bytes.
            return number, _TOKEN_TYPES["int64"], False
    raise DataError(
        f"{path} stores {column!r} as {encoding}, which is not a token type",
        "tokens are ndarray:int32, ndarray:uint16 or bytes",
    )
