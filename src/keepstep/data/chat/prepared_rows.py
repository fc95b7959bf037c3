"""Prepared conversations, read as rows: packed by length, with their loss mask, alone or in pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keepstep.data.batch import Batch, Rows, RowSource, to_batch
from keepstep.data.loader import Loader
from keepstep.data.order import IndexArray
from keepstep.data.packing import pack


class FullLossFirstLoader(Loader):
    """Every token of the first samples carries a loss; later samples follow their loss mask."""

    def __init__(self, source: RowSource, full_loss_samples: int, *, seed: int, shuffle: bool) -> None:
        super().__init__(source, seed=seed, shuffle=shuffle)
        self._full_loss_samples = full_loss_samples

    def rows(self, first_sample: int, count: int) -> Batch:
        """The samples [first_sample, first_sample + count) of the endless stream."""
        read = self._source.read(self._order(first_sample, count))
        full = np.arange(first_sample, first_sample + count) < self._full_loss_samples
        loss = None if read.loss is None else read.loss | full[:, None]
        return to_batch(replace(read, loss=loss), first_sample)


class ChatRows:
    """Prepared conversations as rows of `length` + 1 tokens; with packing, several in one row.

    `paired` ones stay together: two conversations are one piece, with a label.
    """

    def __init__(self, prefix: Path, length: int, *, packing: bool, paired: bool = False) -> None:
        self._tokens = np.load(f"{prefix}.tokens.npy", mmap_mode="r")
        self._lengths = np.load(f"{prefix}.lengths.npy")
        self._loss = np.load(f"{prefix}.loss.npy", mmap_mode="r")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        self._width = length + 1
        self._labels = np.load(f"{prefix}.labels.npy") if paired else None
        self._piece = 2 if paired else 1
        sizes = self._lengths.reshape(-1, self._piece).sum(axis=1)
        self._rows = pack(sizes, self._width) if packing else [[i] for i in range(len(sizes))]
        self._most = max(map(len, self._rows), default=0)
        self.count = len(self._rows)

    @property
    def filled(self) -> float:
        """Share of the rows that is tokens and not padding."""
        return float(self._lengths.sum()) / max(1, self.count * self._width)

    def read(self, indices: IndexArray) -> Rows:
        """Concatenate the conversations of each row; padding is a document of its own without loss."""
        tokens = np.zeros((len(indices), self._width), dtype=np.int64)
        documents = np.zeros_like(tokens)
        loss = np.zeros(tokens.shape, dtype=np.bool_)
        filled = np.zeros(len(indices), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            at = 0
            numbers = [self._piece * piece + part for piece in self._rows[index] for part in range(self._piece)]
            for place, number in enumerate(numbers):
                start, size = int(self._starts[number]), int(self._lengths[number])
                tokens[row, at : at + size] = self._tokens[start : start + size]
                documents[row, at : at + size] = place
                loss[row, at : at + size] = self._bits(start, size)
                at += size
            documents[row, at:] = len(numbers)
            filled[row] = at
        return Rows(tokens, documents, filled, loss, self._row_labels(indices))

    def _row_labels(self, indices: IndexArray) -> NDArray[np.int64] | None:
        """As in `Batch.labels`. The same width for all rows, so that a step's shapes do not change."""
        if self._labels is None:
            return None
        labels = np.full((len(indices), self._most), -1, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            pieces = self._rows[index]
            labels[row, : len(pieces)] = self._labels[pieces]
        return labels

    def conversation(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The tokens of one conversation, and which of them carry a loss."""
        start, size = int(self._starts[number]), int(self._lengths[number])
        return self._tokens[start : start + size], self._bits(start, size)

    def _bits(self, start: int, size: int) -> NDArray[np.bool_]:
        first = start // 8
        bits = np.unpackbits(self._loss[first : -(-(start + size) // 8)])
        return bits[start - first * 8 :][:size].astype(np.bool_)
