"""The exact order of Megatron's GPTDataset, for runs that must see the same samples as a Megatron run.

Unlike our own order, it depends on the number of samples that a run asks for and holds its indices in memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.data.batch import Rows
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.order import IndexArray
from keepstep.data.packing import StreamRows

_LAST_EPOCH_SHARE = 0.8
"""A last epoch of which less than this share of the samples is used is shuffled separately."""


class _OrderedSequences:
    """Sequences in the order in which the samples are cut from them."""

    def __init__(self, reader: MegatronReader, order: NDArray[np.int32]) -> None:
        self._reader = reader
        self._order = order
        self.name = str(reader.prefix)
        self.lengths: NDArray[Any] = reader.lengths[order]

    def part(self, document: int, offset: int, count: int) -> NDArray[Any]:
        return self._reader.sequence(int(self._order[document]))[offset : offset + count]


class GptRows(StreamRows):
    """Rows in GPTDataset's order: row i is its sample i, so they must not be shuffled again."""

    def __init__(
        self,
        reader: MegatronReader,
        documents: range,
        length: int,
        samples: int,
        seed: int,
        vocab: int,
        *,
        bounds: bool = False,
    ) -> None:
        # One generator shuffles first the sequences, then the samples; the order of these draws must not change.
        generator = np.random.RandomState(seed)
        # GPTDataset's documents are the sequences of the index.
        sequences = reader.sequences_of(documents)
        sizes = np.asarray(reader.lengths[sequences.start : sequences.stop], dtype=np.int64)
        if np.any(sizes < 0):
            raise DataError(
                f"{reader.prefix}.idx has a sequence of negative length", "the file is damaged: copy it again"
            )
        tokens = int(sizes.sum())
        if tokens <= length:
            raise DataError(
                f"{reader.prefix} holds {tokens:,} tokens, fewer than one row of {length} + 1",
                "give more data or a smaller model.seq_len",
            )
        wanted = samples or (tokens - 1) // length
        self.order_facts = {"order": "gpt", "seed": seed, "gpt_samples": wanted}
        """What decides the order in addition to the number of rows."""
        epochs = max(1, -(-(wanted * length + 1) // tokens))
        before_last = ((epochs - 1) * tokens - 1) // length
        separate = epochs > 1 and wanted - before_last < int(_LAST_EPOCH_SHARE * ((tokens - 1) // length))
        once = np.arange(sequences.start, sequences.stop, dtype=np.int32)
        repeats = (epochs - 1, 1) if separate else (epochs,)
        order = _shuffled([np.tile(once, count) for count in repeats], generator)
        super().__init__(_OrderedSequences(reader, order), length, vocab, bounds=bounds)
        dtype = np.uint32 if self.count < np.iinfo(np.uint32).max - 1 else np.int64
        cuts = (0, before_last, self.count) if separate else (0, self.count)
        self._samples = _shuffled([np.arange(start, stop, dtype=dtype) for start, stop in pairwise(cuts)], generator)

    def read(self, indices: IndexArray) -> Rows:
        """Join the parts of sequences that make up each sample."""
        return super().read(self._samples[indices])


def _shuffled(parts: list[NDArray[Any]], generator: Any) -> NDArray[Any]:
    """The parts one after another, each shuffled on its own."""
    for part in parts:
        generator.shuffle(part)
    return np.concatenate(parts)
