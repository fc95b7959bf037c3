"""Values of one Parquet column, a bounded amount at a time.

A column may decompress to thousands of times its size on disk: through compression, or because all rows refer to one
dictionary entry. The number of rows in one read follows from the sizes in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from os import SEEK_END
from typing import Any

from keepstep.core.errors import DataError
from keepstep.core.units import format_bytes
from keepstep.data.prepare.parquet_footer import ColumnSizes, RowGroupSizes, row_groups
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
