"""Rows of tokens, and batches: rows shifted into inputs and targets, with the position and document of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError, NothingToReadError
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.order import IndexArray, mix, mix_array


@dataclass(frozen=True)
class Rows:
    """Rows of `length` + 1 tokens each, so that inputs and targets are two views of one array.

    The last token of a row is only a target, so a source may put IGNORE_INDEX there.
    """

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64] | None = None
    """Number of each token's document, counted inside the row; None if it is not needed."""
    filled: NDArray[np.int64] | None = None
    """Tokens of each row that are text and not padding; None if all are."""
    loss: NDArray[np.bool_] | None = None
    """Tokens that carry a loss; None if all do."""
    labels: NDArray[np.int64] | None = None
    """For preference learning, see `Batch.labels`."""


def check_vocab(tokens: NDArray[np.int64], vocab: int, name: str) -> None:
    """Refuse ids outside the vocabulary: on a GPU they would crash a later kernel."""
    # As unsigned integers, negative ids are huge: one pass finds both kinds.
    if not tokens.size or int(tokens.view(np.uint64).max()) < vocab:
        return
    wrong = int(tokens[(tokens >= vocab) | (tokens < 0)][0])
    message = f"{name} holds token {wrong}, but model.vocab is {vocab}"
    if wrong < 0:
        raise DataError(message, "the data is damaged: build or copy it again")
    # `check_vocabulary` did not find it: the data is remote and has no tokenizer, or is too large for a full scan.
    raise NothingToReadError(
        message, "set model.vocab to the number of ids of the data's tokenizer, or build the data with a smaller one"
    )


class RowSource(Protocol):
    """One epoch of rows that can be read by number."""

    @property
    def count(self) -> int:
        """Rows in one epoch."""

    def read(self, indices: IndexArray) -> Rows:
        """The rows with these numbers, in this order."""


class SyntheticRows:
    """Synthetic tokens that a model can learn: mostly x → x + stride, with a jump about every eighth token.

    Row i is a pure function of (seed, first + i). The best loss is about 0.7 nats: an eighth of the tokens is noise.
    """

    def __init__(self, length: int, vocab: int, seed: int, first: int = 0) -> None:
        self._length = length
        self._first = first
        self.count = (1 << 40) - first
        self._states = min(vocab, 4096)
        self._stride = 1 + mix(seed) % max(1, self._states - 1)
        self._seed = np.uint64(mix(seed ^ 0x5EED))

    def read(self, indices: IndexArray) -> Rows:
        """Compute the rows."""
        places = np.arange(self._length + 1, dtype=np.uint64)
        row_keys = mix_array((indices + self._first).astype(np.uint64) ^ self._seed)
        noise = mix_array(row_keys[:, None] + places)
        jumps = (noise & np.uint64(7)) == 0
        jumps[:, 0] = True
        places_signed = places.astype(np.int64)
        last_jump = np.maximum.accumulate(np.where(jumps, places_signed, 0), axis=1)
        landed = ((noise >> np.uint64(8)) % np.uint64(self._states)).astype(np.int64)
        start = np.take_along_axis(landed, last_jump, axis=1)
        return Rows((start + (places_signed - last_jump) * self._stride) % self._states)


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass, int64 [rows, seq]. `inputs` and `targets` are two views of one array."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64] | None
    documents: NDArray[np.int64] | None
    first_sample: int
    labels: NDArray[np.int64] | None = None
    """For preference learning, int64 [rows, pairs]: documents 2k and 2k + 1 of a row are pair k. 1 where the first is
    the wanted answer, 0 where it is an unwanted one, -1 where the row has no such pair."""

    @property
    def num_targets(self) -> int:
        """Targets that carry a loss."""
        return int(np.count_nonzero(self.targets != IGNORE_INDEX))


def to_batch(rows: Rows, first_sample: int) -> Batch:
    """Shift rows into inputs and targets. Padding and, with document numbers, the next document are never targets."""
    inputs, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    if rows.loss is not None:
        targets = np.where(rows.loss[:, 1:], targets, IGNORE_INDEX)
    if rows.filled is not None:
        padding = np.arange(1, rows.tokens.shape[1]) >= rows.filled[:, None]
        targets = np.where(padding, IGNORE_INDEX, targets)
    if rows.documents is None:
        return Batch(inputs, targets, None, None, first_sample)
    documents = rows.documents[:, :-1]
    crosses = documents != rows.documents[:, 1:]
    targets = np.where(crosses, IGNORE_INDEX, targets)
    return Batch(inputs, targets, document_positions(documents), documents, first_sample, rows.labels)


def document_positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions that start again at 0 with each document of a row.

    models.positions has the same function for tensors: data never imports torch, and torch has no maximum.accumulate.
    """
    index = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int64), documents.shape)
    starts = np.zeros_like(documents)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], index[:, 1:], 0)
    return index - np.maximum.accumulate(starts, axis=1)
