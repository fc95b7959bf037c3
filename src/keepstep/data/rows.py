"""Where rows come from: each source reads row i of one epoch, in any order, from any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.order import IndexArray, mix, mix_array

NO_LOSS = -100
"""Target that takes no part in the loss."""


@dataclass(frozen=True)
class Rows:
    """Rows as they were read: `length` + 1 tokens each, so that inputs and targets are two views of one array.

    The last token of a row is only ever a target, so a source may put NO_LOSS there.
    """

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64] | None = None
    """Number of the document each token belongs to, counted inside the row; None when nobody asked."""
    filled: NDArray[np.int64] | None = None
    """Tokens of each row that are text and not padding; None when all are."""
    loss: NDArray[np.bool_] | None = None
    """Tokens that may be learnt; None when all of them are."""


def check_vocab(tokens: NDArray[np.int64], vocab: int, name: str) -> None:
    """Refuse tokens that the model has no row for: on a GPU they would be a crash far from here."""
    # Seen as unsigned, a negative number is huge: one pass finds both kinds.
    if not tokens.size or int(tokens.view(np.uint64).max()) < vocab:
        return
    wrong = tokens[(tokens >= vocab) | (tokens < 0)]
    raise DataError(
        f"{name} holds token {int(wrong[0])}, but model.vocab is {vocab}",
        f"set model.vocab to at least {int(tokens.max()) + 1}, or use the tokenizer the data was made with",
    )


class RowSource(Protocol):
    """One epoch of rows that can be read by number."""

    @property
    def count(self) -> int:
        """Rows in one epoch."""

    def read(self, indices: IndexArray) -> Rows:
        """The rows with these numbers, in this order."""


class PackedRows:
    """Rows cut from the streams of .bin files: row i of a file starts at its token i × length and shares its last token
    with row i + 1. Rows never cross files; the files' rows are numbered through."""

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
