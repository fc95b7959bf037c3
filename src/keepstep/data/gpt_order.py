"""GPTDataset's order, bit for bit, for runs that must see what a Megatron run saw.

Unlike our own order it depends on how many samples a run asks for, and it holds its indices in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.order import IndexArray
from keepstep.data.rows import Rows, check_vocab

_LAST_EPOCH_SHARE = 0.8
"""A last epoch that gives less than this share of its samples is shuffled apart."""


class GptRows:
    """Rows in GPTDataset's order: row i is its sample i, so nothing may be shuffled on top."""

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
        self._reader = reader
        self._length = length
        self._vocab = vocab
        self._bounds = bounds
        # The same generator draws sequences first and samples second; the order of the draws is the format.
        generator = np.random.RandomState(seed)
        # What GPTDataset calls a document is a sequence.
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
        """What decides the order beside the number of rows."""
        epochs = max(1, -(-(wanted * length + 1) // tokens))
        apart = _last_epoch_apart(epochs, tokens, length, wanted)
        order = _sequence_order(sequences, epochs, generator, apart=apart)
        self._sequences = order
        self._ends = np.cumsum(reader.lengths[order], dtype=np.int64)
        total = (epochs * tokens - 1) // length
        first_part = ((epochs - 1) * tokens - 1) // length if apart else total
        self._samples = _sample_order(first_part, total, generator)
        self.count = total

    def read(self, indices: IndexArray) -> Rows:
        """Join the pieces of sequences that make each sample."""
        tokens = np.empty((len(indices), self._length + 1), dtype=np.int64)
        documents = np.zeros_like(tokens)
        for row, sample in enumerate(self._samples[indices].tolist()):
            self._fill(tokens[row], documents[row], sample * self._length)
        check_vocab(tokens, self._vocab, str(self._reader.prefix))
        return Rows(tokens, documents if self._bounds else None)

    def _fill(self, row: NDArray[np.int64], documents: NDArray[np.int64], first_token: int) -> None:
        """One row, and the number of the sequence that each of its tokens is from, counted inside the row."""
        place = int(np.searchsorted(self._ends, first_token, side="right"))
        done = number = 0
        while done < len(row):
            sequence = self._reader.sequence(int(self._sequences[place]))
            skip = first_token + done - (int(self._ends[place]) - len(sequence))
            part = sequence[skip : skip + len(row) - done]
            row[done : done + len(part)] = part
            documents[done : done + len(part)] = number
            done += len(part)
            number += len(part) > 0
            place += 1


def _last_epoch_apart(epochs: int, tokens: int, length: int, wanted: int) -> bool:
    if epochs == 1:
        return False
    from_last = wanted - ((epochs - 1) * tokens - 1) // length
    return from_last < int(_LAST_EPOCH_SHARE * ((tokens - 1) // length))


def _sequence_order(sequences: range, epochs: int, generator: Any, *, apart: bool) -> NDArray[np.int32]:
    once = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    parts = []
    for count in (epochs - 1, 1) if apart else (epochs,):
        part = np.tile(once, count)
        generator.shuffle(part)
        parts.append(part)
    return np.concatenate(parts)


def _sample_order(first_part: int, total: int, generator: Any) -> NDArray[Any]:
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = []
    for start, stop in ((0, first_part), (first_part, total)):
        if stop > start or start == 0:
            part = np.arange(start, stop, dtype=dtype)
            generator.shuffle(part)
            parts.append(part)
    return np.concatenate(parts)
