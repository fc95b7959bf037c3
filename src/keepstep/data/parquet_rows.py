"""Values of one Parquet column, a bounded amount at a time.

A column may unpack to thousands of times its bytes on disk: by its compression, or because all rows name one entry of a
dictionary. So the rows read at once are as few as what the file says about its pages demands.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from os import SEEK_END
from typing import Any

from keepstep.core.errors import DataError
from keepstep.core.units import format_bytes
from keepstep.data.remote import broke_off, is_network, is_remote
from keepstep.data.sources import open_binary, open_parquet

_MOST_ROWS = 1024
_BATCH_BYTES = 1 << 26
_PLAUSIBLE_RATIO = 50
"""Text packs to a tenth, rarely to less than a fiftieth."""
_BOMB_RATIO = 1000
_BOMB_BYTES = 1 << 28
"""A page is unpacked whole: so much of a column, packed like that, is no text, and nobody unpacks it."""
_PAGE_HEAD_BYTES = 16
_DICTIONARY_PAGE = b"\x15\x04\x15"
"""How the head of a dictionary's page starts in Thrift's compact form: the type of the page; then comes its size."""


def column_values(path: str, start: int, stop: int, name: str) -> Iterator[tuple[list[Any], int]]:
    """The values of a column in row groups [start, stop), up to the last where `stop` is -1, and the bytes of the file
    that these rows stand for."""
    file = open_parquet(path)
    if name not in file.schema_arrow.names:
        raise DataError(f"{path} has no column {name!r}", f"--field one of {', '.join(file.schema_arrow.names)}")
    groups = range(start, file.metadata.num_row_groups if stop < 0 else stop)
    try:
        _refuse_bombs(path, file.metadata, groups, name)
        with open_binary(path) as raw:
            rows = [_rows_at_once(file.metadata.row_group(group), name, raw) for group in groups]
            bytes_a_row = raw.seek(0, SEEK_END) / max(1, file.metadata.num_rows)
        for count, alike in groupby(groups, lambda group: rows[group - start]):
            for batch in file.iter_batches(batch_size=count, row_groups=list(alike), columns=[name]):
                yield batch.column(0).to_pylist(), round(bytes_a_row * batch.num_rows)
    except Exception as error:
        if is_remote(path) and is_network(error):
            raise broke_off(path, error) from error
        if isinstance(error, DataError) or not _is_damage(error):
            raise
        raise DataError(f"{path} cannot be read: {error}", "the file is damaged: copy it again") from error


def _is_damage(error: Exception) -> bool:
    """Whether this is what pyarrow raises for damaged pages; sizes they only claim run out of memory."""
    from pyarrow import ArrowException

    return isinstance(error, OSError | ValueError | MemoryError | ArrowException)


def _column(group: Any, name: str) -> Any | None:
    """What a row group says about a column; None where that has others inside it."""
    columns = (group.column(number) for number in range(group.num_columns))
    return next((column for column in columns if column.path_in_schema == name), None)


def _refuse_bombs(path: str, metadata: Any, groups: range, name: str) -> None:
    for group in groups:
        column = _column(metadata.row_group(group), name)
        packed, unpacked = (column.total_compressed_size, column.total_uncompressed_size) if column else (0, 0)
        if unpacked > max(_BOMB_BYTES, _BOMB_RATIO * packed):
            raise DataError(
                f"{path} row group {group} packs {format_bytes(unpacked)} of {name!r} into {format_bytes(packed)}",
                "no text packs like that: leave the file out, or write it again with smaller row groups",
            )


def _rows_at_once(group: Any, name: str, raw: Any) -> int:
    """A power of two of rows whose values are no more than a batch, as far as the file tells."""
    column = _column(group, name)
    if column is None or column.total_uncompressed_size > _PLAUSIBLE_RATIO * column.total_compressed_size:
        return 1
    mean_bytes: int = column.total_uncompressed_size // max(1, group.num_rows)
    rows: int = _BATCH_BYTES // max(1, mean_bytes, _dictionary_bytes(column, raw))
    return 1 << (min(_MOST_ROWS, max(1, rows)).bit_length() - 1)


def _dictionary_bytes(column: Any, raw: Any) -> int:
    """Size of the dictionary that rows may name an entry of, which is the most that one of them can come to."""
    if not any("DICTIONARY" in encoding for encoding in column.encodings):
        return 0
    raw.seek(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)
    head = raw.read(_PAGE_HEAD_BYTES)
    if not head.startswith(_DICTIONARY_PAGE):
        return int(column.total_uncompressed_size)
    value = 0
    for place, byte in enumerate(head[len(_DICTIONARY_PAGE) :]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    # Signed numbers alternate: 0, -1, 1, -2, …
    return value >> 1
