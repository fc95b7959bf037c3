"""Where rows come from: each source reads row i of one epoch, in any order, from any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    loss: NDArray[np.bool_] | None = None
    """Tokens that may be learnt; None when all of them are."""


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
        stream = reader.tokens[self._first : self._last]
        step = stream.strides[0] if stream.size else reader.dtype.itemsize
        # Overlapping windows, one a row: a batch is then a single gather from the mapped file.
        self._windows = np.lib.stride_tricks.as_strided(
            stream, shape=(self.count, length + 1), strides=(step * length, step), writeable=False
        )

    def read(self, indices: IndexArray) -> Rows:
        """Gather rows from the file."""
        found = np.asarray(self._windows[indices])
        if self._can_exceed_vocab and found.size:
            largest, smallest = int(found.max()), int(found.min())
            if largest >= self._vocab or smallest < 0:
                raise DataError(
                    f"{self._reader.prefix} holds token {largest if largest >= self._vocab else smallest}, "
                    f"but model.vocab is {self._vocab}",
                    f"set model.vocab to at least {largest + 1}, or use the tokenizer the data was made with",
                )
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
    documents: NDArray[np.int64] | None = None
    for places, rows in parts:
        tokens[places] = rows.tokens
        if rows.documents is not None:
            documents = np.zeros((count, width), dtype=np.int64) if documents is None else documents
            documents[places] = rows.documents
    return Rows(tokens, documents)


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


def split_documents(readers: Sequence[MegatronReader], share: float) -> tuple[list[range], list[range]]:
    """Ranges of documents for training and, from the end, for validation; at least one document when share > 0."""
    total = sum(reader.documents for reader in readers)
    held_out = min(total, max(1, round(total * share))) if share > 0 else 0
    train: list[range] = []
    valid: list[range] = []
    for reader in reversed(readers):
        here = min(held_out, reader.documents)
        held_out -= here
        train.insert(0, range(reader.documents - here))
        valid.insert(0, range(reader.documents - here, reader.documents))
    return train, valid


def packed(
    readers: Sequence[MegatronReader], ranges: Sequence[range], length: int, vocab: int, *, bounds: bool = False
) -> RowSource:
    """Packed rows over these documents of these files; files without a whole row are left out."""
    parts: list[Any] = [
        PackedRows(reader, documents, length, vocab, bounds=bounds)
        for reader, documents in zip(readers, ranges, strict=True)
    ]
    parts = [part for part in parts if part.count]
    return parts[0] if len(parts) == 1 else ChainedRows(parts)
