"""Values of one Parquet column, a bounded amount at a time.

A column may decompress to thousands of times its size on disk: through compression, or because all rows refer to one
dictionary entry. The number of rows in one read follows from the sizes in the file's metadata.

pyarrow ends the whole process (`terminate called`) if it is asked for the metadata of a damaged column: its Python
layer lets a C++ exception pass. So the footer, a struct in Thrift's compact encoding, is read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from os import SEEK_END
from typing import Any, BinaryIO

from keepstep.core.errors import DataError
from keepstep.core.units import format_bytes
from keepstep.data.prepare.sources import open_binary, open_parquet
from keepstep.data.remote.files import is_network, is_remote, transfer_error

_MOST_ROWS = 1024
_BATCH_BYTES = 1 << 26
_PLAUSIBLE_RATIO = 50
"""Text compresses to about a tenth, rarely to less than a fiftieth."""
_BOMB_RATIO = 1000
_BOMB_BYTES = 1 << 28
"""A page is decompressed in one piece. A column that is larger than this and compresses better than that is not text,
and is refused."""
_PAGE_HEAD_BYTES = 16
_DICTIONARY_PAGE = b"\x15\x04\x15"
"""Start of a dictionary page's header in Thrift's compact encoding: the page type; the page size follows."""
_DICTIONARY_ENCODINGS = {2, 8}
_INTEGERS = range(3, 7)
_TRUE, _FALSE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 7, 8, 9, 10, 11, 12
_MOST_VARINT_BYTES = 10


def column_values(path: str, start: int, stop: int, name: str) -> Iterator[tuple[list[Any], int]]:
    """The values of a column in row groups [start, stop), and their share of the file's bytes; `stop` -1 means all."""
    file = open_parquet(path)
    if name not in file.schema_arrow.names:
        raise DataError(f"{path} has no column {name!r}", f"--field one of {', '.join(file.schema_arrow.names)}")
    groups = range(start, file.metadata.num_row_groups if stop < 0 else stop)
    try:
        with open_binary(path) as raw:
            sizes = row_groups(raw)
            _refuse_bombs(path, sizes, groups, name)
            rows = [_rows_per_batch(sizes[group], name, raw) for group in groups]
            bytes_per_row = raw.seek(0, SEEK_END) / max(1, file.metadata.num_rows)
        for count, same in groupby(groups, lambda group: rows[group - start]):
            for batch in file.iter_batches(batch_size=count, row_groups=list(same), columns=[name]):
                yield batch.column(0).to_pylist(), round(bytes_per_row * batch.num_rows)
    except Exception as error:
        if is_remote(path) and is_network(error):
            raise transfer_error(path, error) from error
        from pyarrow import ArrowException

        # What pyarrow raises for damaged pages; a MemoryError comes from a false size in them.
        if isinstance(error, DataError) or not isinstance(
            error, OSError | ValueError | IndexError | MemoryError | ArrowException
        ):
            raise
        raise DataError(f"{path} cannot be read: {error}", "the file is damaged: copy it again") from error


def _refuse_bombs(path: str, sizes: list[RowGroupSizes], groups: range, name: str) -> None:
    for group in groups:
        # A nested column has no entry of its own.
        column = sizes[group].columns.get(name)
        packed, unpacked = (column.compressed_bytes, column.uncompressed_bytes) if column else (0, 0)
        if unpacked > max(_BOMB_BYTES, _BOMB_RATIO * packed):
            raise DataError(
                f"{path} row group {group} packs {format_bytes(unpacked)} of {name!r} into {format_bytes(packed)}",
                "text does not compress like that: leave the file out, or write it again with smaller row groups",
            )


def _rows_per_batch(group: RowGroupSizes, name: str, raw: Any) -> int:
    """A power of two of rows whose values fit a batch, according to the file's metadata."""
    column = group.columns.get(name)
    if column is None or column.uncompressed_bytes > _PLAUSIBLE_RATIO * column.compressed_bytes:
        return 1
    mean_bytes = column.uncompressed_bytes // max(1, group.num_rows)
    rows = _BATCH_BYTES // max(1, mean_bytes, _dictionary_bytes(column, raw))
    return 1 << (min(_MOST_ROWS, max(1, rows)).bit_length() - 1)


def _dictionary_bytes(column: ColumnSizes, raw: Any) -> int:
    """Size of the column's dictionary, which is the most that one value can take."""
    if not column.has_dictionary:
        return 0
    raw.seek(column.first_page)
    head = raw.read(_PAGE_HEAD_BYTES)
    if not head.startswith(_DICTIONARY_PAGE):
        return column.uncompressed_bytes
    value = 0
    for place, byte in enumerate(head[len(_DICTIONARY_PAGE) :]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    # Zigzag encoding of signed numbers: 0, -1, 1, -2, …
    return value >> 1


@dataclass(frozen=True)
class ColumnSizes:
    """What a footer says about one column of one row group."""

    compressed_bytes: int
    uncompressed_bytes: int
    first_page: int
    """Where its first page starts in the file: the dictionary, if it has one."""
    has_dictionary: bool


@dataclass(frozen=True)
class RowGroupSizes:
    """Rows of a row group, and its columns by dotted path."""

    num_rows: int
    columns: dict[str, ColumnSizes]


def row_groups(file: BinaryIO) -> list[RowGroupSizes]:
    """The row groups of a Parquet file; ValueError if the footer is damaged."""
    file_bytes = file.seek(0, SEEK_END)
    file.seek(max(0, file_bytes - 8))
    footer_bytes = int.from_bytes(file.read(8)[:4], "little")
    if footer_bytes + 8 > file_bytes:
        raise ValueError(f"its footer has {footer_bytes} bytes, but the file has {file_bytes}")
    file.seek(file_bytes - 8 - footer_bytes)
    try:
        return [_row_group(group) for group in _Thrift(file.read(footer_bytes)).value(_STRUCT)[4]]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its footer is damaged") from error


def _row_group(group: dict[int, Any]) -> RowGroupSizes:
    # The numbers are those of the fields in parquet.thrift.
    columns = [chunk[3] for chunk in group[1]]
    return RowGroupSizes(group[3], {b".".join(column[3]).decode(): _column(column) for column in columns})


def _column(column: dict[int, Any]) -> ColumnSizes:
    return ColumnSizes(column[7], column[6], column.get(11, column[9]), not _DICTIONARY_ENCODINGS.isdisjoint(column[2]))


class _Thrift:
    """Thrift's compact encoding. A struct is a dict by field number. No value is empty, so a false size ends soon."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self, kind: int) -> Any:
        """The next value."""
        if kind in (_TRUE, _FALSE):
            return self._byte() == _TRUE
        if kind in _INTEGERS:
            # Zigzag encoding of signed numbers: 0, -1, 1, -2, …
            number = self._byte() if kind == _INTEGERS[0] else self._varint()
            return number >> 1 ^ -(number & 1)
        if kind in (_DOUBLE, _BINARY):
            return self._bytes(8 if kind == _DOUBLE else self._varint())
        if kind in (_LIST, _SET):
            head = self._byte()
            return [self.value(head & 15) for _ in range(head >> 4 if head < 0xF0 else self._varint())]
        if kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            return [(self.value(kinds >> 4), self.value(kinds & 15)) for _ in range(count)]
        if kind != _STRUCT:
            raise ValueError("its footer is damaged")
        return self._struct()

    def _struct(self) -> dict[int, Any]:
        fields, number = dict[int, Any](), 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self.value(_INTEGERS[1])
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self.value(kind)
        return fields

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise ValueError("its footer is damaged")
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = 0
        for place in range(_MOST_VARINT_BYTES):
            byte = self._byte()
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value & (2**64 - 1)
        raise ValueError("its footer is damaged")
