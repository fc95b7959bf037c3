"""Where rows come from: each source reads row i of one epoch, in any order, from any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.order import IndexArray, mix, mix_array


@dataclass(frozen=True)
class Rows:
    """Rows as they were read: `length` + 1 tokens each, so that inputs and targets are two views of one array."""

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64] | None = None
    """Number of the document each token belongs to, counted inside the row; None when nobody asked."""
    filled: NDArray[np.int64] | None = None
    """Tokens of each row that are text and not padding; None when all are."""


def check_vocab(tokens: NDArray[Any], vocab: int, name: str) -> None:
    """Refuse tokens that the model has no row for: on a GPU they would be a crash far from here."""
    if not tokens.size:
        return
    largest, smallest = int(tokens.max()), int(tokens.min())
    if largest >= vocab or smallest < 0:
        raise DataError(
            f"{name} holds token {largest if largest >= vocab else smallest}, but model.vocab is {vocab}",
            f"set model.vocab to at least {largest + 1}, or use the tokenizer the data was made with",
        )


class RowSource(Protocol):
    """One epoch of rows that can be read by number."""

    @property
    def count(self) -> int:
        """Rows in one epoch."""

    def read(self, indices: IndexArray) -> Rows:
        """The rows with these numbers, in this order."""


class PackedRows:
    """Rows cut from one stream of tokens: row i starts at token i × length and shares its last token with row i + 1."""

    def __init__(self, reader: MegatronReader, documents: range, length: int, vocab: int, *, bounds: bool) -> None:
        self._reader = reader
        self._first = reader.document_start(documents.start)
        self._last = reader.document_start(documents.stop)
        self._length = length
        self._vocab = vocab
        self._bounds = bounds
        self._can_exceed_vocab = int(np.iinfo(reader.dtype).max) >= vocab or np.iinfo(reader.dtype).min < 0
        self.count = max(0, (self._last - self._first - 1) // length)

    def read(self, indices: IndexArray) -> Rows:
        """Gather rows from the file."""
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.count):
            raise IndexError(f"rows are numbered 0 to {self.count - 1}")
        size = self._reader.dtype.itemsize
        # Overlapping windows, one a row: a batch is then a single gather from the mapped file.
        windows: NDArray[Any] = np.ndarray(
            (self.count, self._length + 1),
            self._reader.dtype,
            self._reader.tokens.data,
            offset=self._first * size,
            strides=(size * self._length, size),
        )
        found = windows[indices]
        if self._can_exceed_vocab:
            check_vocab(found, self._vocab, str(self._reader.prefix))
        return Rows(found.astype(np.int64), self._number_documents(indices) if self._bounds else None)

    def _number_documents(self, indices: IndexArray) -> NDArray[np.int64]:
        numbers = np.zeros((len(indices), self._length + 1), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            begin = self._first + index * self._length
            starts = self._reader.starts_between(begin + 1, begin + self._length + 1)
            numbers[row, starts - begin] = 1
        np.cumsum(numbers, axis=1, out=numbers)
        return numbers


class ChainedRows:
    """Sources one after the other, numbered through."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._ends = np.cumsum([source.count for source in sources], dtype=np.int64)
        self.count = int(self._ends[-1]) if sources else 0

    def read(self, indices: IndexArray) -> Rows:
        """Ask each source for its share and put the answers back in order."""
        owner = np.searchsorted(self._ends, indices, side="right")
        parts: list[tuple[NDArray[np.int64], Rows]] = []
        for number in np.unique(owner).tolist():
            places = np.flatnonzero(owner == number)
            start = int(self._ends[number]) - self._sources[number].count
            parts.append((places, self._sources[number].read(indices[places] - start)))
        return _join(parts, len(indices))


def _join(parts: list[tuple[NDArray[np.int64], Rows]], count: int) -> Rows:
    if len(parts) == 1:
        return parts[0][1]
    width = parts[0][1].tokens.shape[1]
    tokens = np.empty((count, width), dtype=np.int64)
    documents = (
        np.zeros((count, width), dtype=np.int64) if any(rows.documents is not None for _, rows in parts) else None
    )
    filled = np.full(count, width, dtype=np.int64) if any(rows.filled is not None for _, rows in parts) else None
    for places, rows in parts:
        tokens[places] = rows.tokens
        if documents is not None and rows.documents is not None:
            documents[places] = rows.documents
        if filled is not None and rows.filled is not None:
            filled[places] = rows.filled
    return Rows(tokens, documents, filled)


class SyntheticRows:
    """Made-up tokens that a model can learn: mostly x → x + stride, with a jump about every eighth token.

    Row i is a pure function of (seed, i). The best loss is near 0.7 nats: an eighth of the tokens is noise.
    """

    count = 1 << 40
    _states = 4096

    def __init__(self, length: int, vocab: int, seed: int) -> None:
        self._length = length
        self._states = min(vocab, SyntheticRows._states)
        self._stride = 1 + mix(seed) % max(1, self._states - 1)
        self._seed = np.uint64(mix(seed ^ 0x5EED))

    def read(self, indices: IndexArray) -> Rows:
        """Compute the rows."""
        places = np.arange(self._length + 1, dtype=np.uint64)
        row_keys = mix_array(indices.astype(np.uint64) ^ self._seed)
        noise = mix_array(row_keys[:, None] + places)
        jumps = (noise & np.uint64(7)) == 0
        jumps[:, 0] = True
        places_signed = places.astype(np.int64)
        last_jump = np.maximum.accumulate(np.where(jumps, places_signed, 0), axis=1)
        landed = ((noise >> np.uint64(8)) % np.uint64(self._states)).astype(np.int64)
        start = np.take_along_axis(landed, last_jump, axis=1)
        return Rows((start + (places_signed - last_jump) * self._stride) % self._states)


def split_documents(counts: Sequence[int], shares: Sequence[float]) -> list[list[range]]:
    """Documents of files for training, then one part for each share, cut from the end in that order.

    A share above 0 gets at least one document. The answer has one list of ranges, one range a file, for each part.
    """
    total = sum(counts)
    sizes = [max(1, round(total * share)) if share > 0 else 0 for share in shares]
    bounds = [max(0, total - sum(sizes[number:])) for number in range(len(sizes))]
    bounds = [0, *bounds, total]
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return [
        [
            range(min(max(low - start, 0), count), min(max(high - start, 0), count))
            for start, count in zip(starts, counts, strict=False)
        ]
        for low, high in pairwise(bounds)
    ]


def chain(sources: Sequence[RowSource]) -> RowSource:
    """Several sources as one; those without a whole row are left out."""
    parts = [source for source in sources if source.count]
    return parts[0] if len(parts) == 1 else ChainedRows(parts)


def packed(
    readers: Sequence[MegatronReader], ranges: Sequence[range], length: int, vocab: int, *, bounds: bool = False
) -> RowSource:
    """Packed rows over these documents of these files."""
    return chain(
        [
            PackedRows(reader, documents, length, vocab, bounds=bounds)
            for reader, documents in zip(readers, ranges, strict=True)
        ]
    )
