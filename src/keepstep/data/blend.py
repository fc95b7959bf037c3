"""Weighted blends: which data set sample i comes from, and which of its samples that is.

Each step takes the data set that is furthest behind its weight, as Megatron does. The choices repeat after a period in
which every data set has had exactly its share, so one period is all that is kept and sample 10^12 is one division away.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import ConfigError
from keepstep.data.order import IndexArray

LONGEST_PERIOD = 1 << 16


def greedy(weights: Sequence[float], samples: int) -> NDArray[np.int64]:
    """The data set of each sample: always the one with the largest weight × max(i, 1) − taken."""
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum()
    taken = np.zeros(len(shares))
    chosen = np.empty(samples, dtype=np.int64)
    for number in range(samples):
        behind = int(np.argmax(shares * max(number, 1) - taken))
        chosen[number] = behind
        taken[behind] += 1
    return chosen


class Blend:
    """Maps global sample indices to (data set, sample inside it)."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or any(not 0 < weight < float("inf") for weight in weights):
            raise ConfigError(f"data.blend has weights {list(weights)}, but each must be above 0", "drop the others")
        self.counts = _counts(weights)
        self.period = sum(self.counts)
        self._chosen = greedy(self.counts, self.period)
        assert np.bincount(self._chosen, minlength=len(weights)).tolist() == self.counts
        # Column d, row i: how many of data set d the first i samples of a period hold.
        marks = self._chosen[:, None] == np.arange(len(weights))
        self._before = np.concatenate([np.zeros((1, len(weights)), np.int64), np.cumsum(marks, axis=0)])

    def taken(self, sample: int) -> NDArray[np.int64]:
        """Samples of each data set among the first `sample` of the blend."""
        periods, rest = divmod(sample, self.period)
        result: NDArray[np.int64] = periods * np.array(self.counts, dtype=np.int64) + self._before[rest]
        return result

    def chosen(self, first: int, count: int) -> IndexArray:
        """The data set of each of these samples."""
        places = (first + np.arange(count, dtype=np.int64)) % self.period
        result: IndexArray = self._chosen[places]
        return result


def _counts(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights; exact where a period of at most 65,536 allows it."""
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    shares = [fraction / total for fraction in fractions]
    period = lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    counts = [max(1, int(share * LONGEST_PERIOD)) for share in shares]
    # What rounding lost goes to the largest, where it changes the share least.
    counts[counts.index(max(counts))] += LONGEST_PERIOD - sum(counts)
    return counts
