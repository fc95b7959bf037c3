"""The order of samples: pure functions of (seed, global sample index) that hold nothing in memory.

A permutation of n samples is a Feistel network on the smallest even number of bits that covers n. An index outside n is
permuted again until it is inside (cycle walking), so every sample occurs exactly once. Looking up sample 10^12 costs
the same as sample 0, and any rank can do it alone.

A blend takes each sample from the data set that is furthest behind its weight, as in Megatron. The choices repeat after
a period in which every data set has had exactly its share, so only one period is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import ConfigError

ROUNDS = 6
LONGEST_PERIOD = 1 << 16
_MASK = (1 << 64) - 1

IndexArray = NDArray[np.int64]


def mix(value: int) -> int:
    """Mix 64 bits so that neighbouring values become unrelated (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` for an array, element by element."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(indices: IndexArray, samples: int, seed: int, epoch: int) -> IndexArray:
    """Where the permutation of (seed, epoch) sends each index of range(samples)."""
    if samples < 2:
        return indices.copy()
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(mix(seed & _MASK) ^ mix((epoch << 8) | number))) for number in range(ROUNDS)]
    result = _feistel(indices.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(result >= samples)
    while outside.size:
        result[outside] = _feistel(result[outside], half_bits, keys)
        outside = outside[result[outside] >= samples]
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix_array(right ^ key) & mask)
    return (left << shift) | right


def sample_order(first: int, count: int, samples: int, seed: int, shuffle: bool, window: int = 0) -> IndexArray:
    """The samples of the global indices [first, first + count); each epoch visits every sample once.

    With a window, samples are shuffled only among about that many neighbours on disk, and the windows among themselves.
    This is for remote data, where every jump may fetch another file.
    """
    order = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, start = divmod(first + done, samples)
        here = min(count - done, samples - start)
        indices = np.arange(start, start + here, dtype=np.int64)
        if shuffle and 0 < window < samples:
            indices = _permute_windows(indices, samples, window, seed, epoch)
        elif shuffle:
            indices = permute(indices, samples, seed, epoch)
        order[done : done + here] = indices
        done += here
    return order


def _permute_windows(indices: IndexArray, samples: int, window: int, seed: int, epoch: int) -> IndexArray:
    """Windows in random order, and random order inside each; the last window may be short."""
    windows = -(-samples // window)
    short = samples - (windows - 1) * window
    places = permute(np.arange(windows, dtype=np.int64), windows, seed, epoch)
    # Where each window starts in the new order: all are full except the last one on disk.
    sizes = np.where(places == windows - 1, short, window)
    starts = np.cumsum(sizes) - sizes
    slot = np.searchsorted(starts, indices, side="right") - 1
    result = np.empty_like(indices)
    for number in np.unique(slot).tolist():
        inside = slot == number
        chosen = int(places[number])
        local = permute(indices[inside] - starts[number], int(sizes[number]), seed ^ mix(chosen + 1), epoch)
        result[inside] = chosen * window + local
    return result


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
            raise ConfigError(
                f"data.blend has weights {list(weights)}, but each must be above 0",
                "remove the sources with a weight of 0 or less",
            )
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
    # The rounding error goes to the largest count, where it changes the share least.
    counts[counts.index(max(counts))] += LONGEST_PERIOD - sum(counts)
    return counts
