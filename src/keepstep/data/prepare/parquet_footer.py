"""The sizes of columns from a Parquet footer.

pyarrow ends the whole process (`terminate called`) if it is asked for the metadata of a damaged column: its Python
layer lets a C++ exception pass. So the footer, a struct in Thrift's compact encoding, is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import SEEK_END
from typing import Any, BinaryIO

_DICTIONARY_ENCODINGS = {2, 8}
_INTEGERS = range(3, 7)
_TRUE, _FALSE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 7, 8, 9, 10, 11, 12
_MOST_VARINT_BYTES = 10


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
