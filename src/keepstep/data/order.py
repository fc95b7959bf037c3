"""Which sample comes when: pure functions of (seed, global sample index), with nothing held in memory.

A permutation of n samples is a Feistel network on the smallest even number of bits that covers n; an index that lands
outside n goes through again until it is inside (cycle walking), so every sample comes exactly once. Looking up sample
10^12 costs what sample 0 costs, and any rank can do it alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_MASK = (1 << 64) - 1

IndexArray = NDArray[np.int64]


def mix(value: int) -> int:
    """Spread 64 bits so that neighbours share nothing (the finaliser of splitmix64)."""
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
    """The samples that global indices [first, first + count) name; each epoch visits every sample once.

    With a window, samples are shuffled only among about that many neighbours on disk, and the windows among themselves:
    for data that is fetched, where every jump may cost a file.
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
    # Where each window of the new order starts: all are full but the one that was last on disk.
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
