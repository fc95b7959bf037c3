"""Strategies that make rows from documents: a plain stream, trunc, overflow and best-fit packing.

All but `PackedRows` map a row to segments (document, offset, length). The rest of a row is padding without loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import ConfigError
from keepstep.core.messages import invalid_value
from keepstep.data.batch import Rows, check_vocab
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.order import IndexArray

Segment = tuple[int, int, int]
"""Document, offset inside it, tokens taken."""


class DocumentStore(Protocol):
    """Documents that can be read by number."""

    name: str

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""

    def part(self, document: int, offset: int, count: int) -> NDArray[Any]:
        """Tokens [offset, offset + count) of one document."""


class SegmentRows:
    """Rows made of segments of documents."""

    count: int

    def __init__(self, store: DocumentStore, length: int, vocab: int) -> None:
        self._store = store
        self._length = length
        self._vocab = vocab

    def segments(self, row: int) -> Sequence[Segment]:
        """The segments of one row."""
        raise NotImplementedError

    def read(self, indices: IndexArray) -> Rows:
        """Fill rows from their segments and number the documents in them."""
        shape = (len(indices), self._length + 1)
        tokens, documents = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        filled = np.zeros(len(indices), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            done = number = 0
            for number, (document, offset, count) in enumerate(self.segments(index)):
                tokens[row, done : done + count] = self._store.part(document, offset, count)
                documents[row, done : done + count] = number
                done += count
            documents[row, done:] = number + 1
            filled[row] = done
        check_vocab(tokens, self._vocab, self._store.name)
        return Rows(tokens, documents, filled)


class PackedRows:
    """Rows from the streams of .bin files: row i of a file starts at its token i × length and shares its last token
    with row i + 1. Rows never cross files; rows of all files are numbered consecutively."""

    def __init__(
        self, readers: Sequence[MegatronReader], ranges: Sequence[range], length: int, vocab: int, *, bounds: bool
    ) -> None:
        self._readers = readers
        self._length = length
        self._vocab = vocab
        self._bounds = bounds
        self._first = [reader.document_start(part.start) for reader, part in zip(readers, ranges, strict=True)]
        last = [reader.document_start(part.stop) for reader, part in zip(readers, ranges, strict=True)]
        counts = [max(0, (end - start - 1) // length) for start, end in zip(self._first, last, strict=True)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._starts: IndexArray = self._ends - np.array(counts, dtype=np.int64)
        self._can_exceed_vocab = any(
            int(np.iinfo(reader.dtype).max) >= vocab or np.iinfo(reader.dtype).min < 0 for reader in readers
        )
        self.count = int(self._ends[-1]) if counts else 0

    def read(self, indices: IndexArray) -> Rows:
        """Copy rows out of the mapped files."""
        owners = np.searchsorted(self._ends, indices, side="right")
        begins = (indices - self._starts[np.minimum(owners, len(self._starts) - 1)]) * self._length
        width = self._length + 1
        tokens = np.empty((len(indices), width), dtype=np.int64)
        documents = np.zeros_like(tokens) if self._bounds else None
        for row, (owner, begin) in enumerate(zip(owners.tolist(), begins.tolist(), strict=True)):
            start = self._first[owner] + begin
            tokens[row] = self._readers[owner].tokens[start : start + width]
            if documents is not None:
                documents[row, self._readers[owner].starts_between(start + 1, start + width) - start] = 1
        if self._can_exceed_vocab:
            check_vocab(tokens, self._vocab, str(self._readers[0].prefix))
        return Rows(tokens, None if documents is None else np.cumsum(documents, axis=1))


class StreamRows(SegmentRows):
    """Rows from documents laid end to end, for stores that are not a single stream on disk."""

    def __init__(self, store: DocumentStore, length: int, vocab: int, *, bounds: bool) -> None:
        super().__init__(store, length, vocab)
        self._bounds = bounds
        self._ends = np.cumsum(store.lengths, dtype=np.int64)
        total = int(self._ends[-1]) if len(self._ends) else 0
        self.count = max(0, (total - 1) // length)

    def segments(self, row: int) -> Sequence[Segment]:
        """The parts of all documents that the row touches."""
        at, left = row * self._length, self._length + 1
        document = int(np.searchsorted(self._ends, at, side="right"))
        found = []
        while left:
            end, size = int(self._ends[document]), int(self._store.lengths[document])
            count = min(end - at, left)
            if count:
                found.append((document, at - (end - size), count))
            at, left, document = at + count, left - count, document + 1
        return found

    def read(self, indices: IndexArray) -> Rows:
        """Full rows, without padding."""
        rows = super().read(indices)
        return replace(rows, documents=rows.documents if self._bounds else None, filled=None)


class TruncRows(SegmentRows):
    """One row for each document: its first tokens; the rest is dropped."""

    def __init__(self, store: DocumentStore, length: int, vocab: int) -> None:
        super().__init__(store, length, vocab)
        self.count = len(store.lengths)

    def segments(self, row: int) -> Sequence[Segment]:
        """The start of the document."""
        return [(row, 0, min(int(self._store.lengths[row]), self._length + 1))]


class OverflowRows(SegmentRows):
    """As many rows as a document needs; each starts `stride` tokens after the previous one."""

    def __init__(self, store: DocumentStore, length: int, vocab: int, stride: int) -> None:
        super().__init__(store, length, vocab)
        if not 0 < stride <= length:
            wrong = invalid_value("data.stride", stride, f"must be between 1 and model.seq_len ({length})")
            raise ConfigError(wrong, f"data.stride={length}: windows that do not overlap")
        self._stride = stride
        rest = np.maximum(0, store.lengths - (length + 1))
        self._ends = np.cumsum(1 + -(-rest // stride))
        self.count = int(self._ends[-1]) if len(self._ends) else 0

    def segments(self, row: int) -> Sequence[Segment]:
        """One window of one document."""
        document = int(np.searchsorted(self._ends, row, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        offset = (row - first) * self._stride
        return [(document, offset, min(self._length + 1, int(self._store.lengths[document]) - offset))]


class BestFitRows(SegmentRows):
    """Documents packed into the rows where they leave the least room; only those longer than a row are split."""

    def __init__(self, store: DocumentStore, length: int, vocab: int) -> None:
        super().__init__(store, length, vocab)
        pieces = _pieces(store.lengths, length + 1)
        self._pieces = pieces
        row_of = best_fit(pieces[:, 2], length + 1)
        self._order = np.argsort(row_of, kind="stable")
        self.count = int(row_of.max()) + 1 if len(row_of) else 0
        self._starts = np.searchsorted(row_of[self._order], np.arange(self.count + 1))

    def segments(self, row: int) -> Sequence[Segment]:
        """The documents packed together here, in their order on disk."""
        chosen = self._pieces[self._order[self._starts[row] : self._starts[row + 1]]]
        return [(document, offset, count) for document, offset, count in chosen.tolist()]


def _pieces(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Every document as one piece, or, where it is longer than a row, as several full pieces and a rest."""
    parts = np.maximum(1, -(-lengths // room))
    document = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    offset = number * room
    size = np.minimum(room, lengths[document] - offset)
    pieces: NDArray[np.int64] = np.stack([document, offset, size], axis=1)
    kept: NDArray[np.int64] = pieces[size > 0]
    return kept


def best_fit(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The row of each piece: largest first, each into the fullest row that still has room for it.

    Rows are grouped by the room they have left. One integer has a bit for each such room, so that the smallest room
    that fits is found in one operation.
    """
    row_of = np.empty(len(sizes), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]
    rooms = 0
    rows = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                rooms &= ~(1 << left)
        else:
            left, row = room, rows
            rows += 1
        row_of[piece] = row
        left -= size
        if left:
            open_rows[left].append(row)
            rooms |= 1 << left
    return row_of


def pack(sizes: NDArray[np.int64], room: int) -> list[list[int]]:
    """The pieces of each row by `best_fit`, the longest first. No piece may be longer than a row."""
    if int(sizes.max(initial=0)) > room:
        raise ValueError(f"a document of {int(sizes.max())} tokens does not fit a row of {room}")
    row_of = best_fit(sizes, room)
    rows: list[list[int]] = [[] for _ in range(int(row_of.max(initial=-1)) + 1)]
    for piece in np.argsort(-sizes, kind="stable").tolist():
        rows[row_of[piece]].append(piece)
    return rows
