"""How documents become rows when rows do not simply follow the stream: trunc, overflow and best-fit packing.

Each strategy maps a row to segments (document, offset, length); what a row has left over is padding without loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import ConfigError
from keepstep.data.order import IndexArray
from keepstep.data.rows import Rows, check_vocab

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


class TruncRows(SegmentRows):
    """One row a document: its first tokens; the rest is left out."""

    def __init__(self, store: DocumentStore, length: int, vocab: int) -> None:
        super().__init__(store, length, vocab)
        self.count = len(store.lengths)

    def segments(self, row: int) -> Sequence[Segment]:
        """The start of the document."""
        return [(row, 0, min(int(self._store.lengths[row]), self._length + 1))]


class OverflowRows(SegmentRows):
    """As many rows as a document needs; each starts `stride` tokens after the one before."""

    def __init__(self, store: DocumentStore, length: int, vocab: int, stride: int) -> None:
        super().__init__(store, length, vocab)
        if not 0 < stride <= length:
            raise ConfigError(f"data.stride is {stride}, but it must be between 1 and model.seq_len ({length})")
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
    """Whole documents packed into rows where they leave the least room; only those longer than a row are cut."""

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
    """Every document as one piece, or as several full ones and a rest where it is longer than a row."""
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

    Rows are kept by the room they have left; one integer with a bit for each such room finds the tightest at once.
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


class StreamRows:
    """Rows cut from documents laid end to end, for stores that are no single stream on disk."""

    def __init__(self, store: DocumentStore, length: int, vocab: int, *, bounds: bool) -> None:
        self._store = store
        self._length = length
        self._vocab = vocab
        self._bounds = bounds
        self._ends = np.cumsum(store.lengths, dtype=np.int64)
        total = int(self._ends[-1]) if len(self._ends) else 0
        self.count = max(0, (total - 1) // length)

    def read(self, indices: IndexArray) -> Rows:
        """Walk over the documents that each row touches."""
        shape = (len(indices), self._length + 1)
        tokens, documents = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            first = index * self._length
            document = int(np.searchsorted(self._ends, first, side="right"))
            done = number = 0
            while done <= self._length:
                end, size = int(self._ends[document]), int(self._store.lengths[document])
                count = min(end - first - done, self._length + 1 - done)
                tokens[row, done : done + count] = self._store.part(document, first + done - (end - size), count)
                documents[row, done : done + count] = number
                done += count
                document += 1
                number += count > 0
        check_vocab(tokens, self._vocab, self._store.name)
        return Rows(tokens, documents if self._bounds else None)
