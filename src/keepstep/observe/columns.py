"""Metrics as columns with rising steps: append, roll back, smooth, and downsample for the screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from keepstep.observe.run_folder import Record, number

FloatArray = NDArray[np.float64]
_BLOCK = 32


class Columns:
    """A table of float64 columns, one row per step. Missing values are NaN."""

    def __init__(self) -> None:
        self.count = 0
        self._data: dict[str, FloatArray] = {}

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self._data)

    def __len__(self) -> int:
        return self.count

    def column(self, name: str) -> FloatArray:
        """All values of one column; all NaN if it does not exist."""
        if name in self._data:
            return self._data[name][: self.count]
        return np.full(self.count, np.nan)

    def last(self, name: str) -> float:
        """The newest value, or NaN."""
        return float(self._data[name][self.count - 1]) if self.count and name in self._data else math.nan

    def append(self, records: Sequence[Record]) -> None:
        """Add rows with rising steps, all larger than the newest step."""
        names = set(chain.from_iterable(records))
        self.append_arrays({name: _values(records, name) for name in names}, len(records))

    def append_arrays(self, arrays: dict[str, FloatArray], count: int) -> None:
        """Add `count` rows given as columns."""
        end = self.count + count
        for name in arrays.keys() | self._data.keys():
            values = arrays.get(name)
            held = self._data.get(name)
            if values is not None and held is None and np.isnan(values).all():
                continue
            if held is None or len(held) < end:
                larger = np.full(max(end, 2 * self.count), np.nan)
                if held is not None:
                    larger[: self.count] = held[: self.count]
                self._data[name] = held = larger
            held[self.count : end] = np.nan if values is None else values
        self.count = end

    def roll_back(self, step: float, names: Sequence[str]) -> tuple[dict[str, FloatArray], int]:
        """Remove the rows from `step` on; return the columns `names` of them, and their number."""
        kept = int(np.searchsorted(self.column("step"), step))
        gone = {name: self.column(name)[kept:].copy() for name in names}
        count, self.count = self.count - kept, kept
        return gone, count


def _values(records: Sequence[Record], name: str) -> FloatArray:
    try:
        values = np.array(list(map(itemgetter(name), records)), dtype=np.float64)
        if values.ndim == 1:
            return values
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    return np.fromiter((number(record.get(name)) for record in records), np.float64, len(records))


def smooth(values: Sequence[float] | FloatArray, weight: float) -> FloatArray:
    """Exponential moving average with bias correction, as in TensorBoard; gaps stay gaps."""
    raw = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(raw)
    result = np.full_like(raw, np.nan)
    solid = raw[finite]
    if not len(solid) or weight <= 0:
        result[finite] = solid
        return result
    sums = _running(solid * (1 - weight), weight)
    # At the start the weights do not sum to 1 yet; expm1 stays exact for weights close to 1.
    mass = -np.expm1(np.arange(1, len(solid) + 1) * math.log(weight))
    result[finite] = sums / mass
    return result


def _running(values: FloatArray, weight: float) -> FloatArray:
    """y[t] = weight · y[t - 1] + values[t], over all blocks in parallel, then over the carries between blocks.

    A plain loop over 100,000 steps would take longer than drawing them.
    """
    count, blocks = len(values), -(-len(values) // _BLOCK)
    sums = np.zeros(blocks * _BLOCK)
    sums[:count] = values
    sums = np.ascontiguousarray(sums.reshape(blocks, _BLOCK).T)
    for place in range(1, _BLOCK):
        sums[place] += weight * sums[place - 1]
    if blocks > 1:
        carries = _running(sums[-1], weight**_BLOCK)
        sums[:, 1:] += np.multiply.outer(weight ** np.arange(1, _BLOCK + 1), carries[:-1])
    return sums.T.reshape(-1)[:count]


@dataclass(frozen=True)
class Downsampled:
    """A column in few pieces. Each piece keeps its smallest and largest value, so that no spike is lost."""

    steps: list[float]
    low: list[float]
    high: list[float]
    raw: list[float]
    """The value of exactly the step in `steps`, the last one of each piece."""
    smooth: list[float]
    """The average at that step; equal to `raw` where nothing is smoothed."""


def downsample(steps: FloatArray, values: FloatArray, averaged: FloatArray, pieces: int) -> Downsampled:
    """At most `pieces` equal pieces, each with the range of `values`, and the last of `values` and `averaged`.

    Values that are not finite are left out.
    """
    finite = np.isfinite(values)
    steps, values, averaged = steps[finite], values[finite], averaged[finite]
    if not len(values):
        return Downsampled([], [], [], [], [])
    edges = np.unique(np.linspace(0, len(values), min(pieces, len(values)) + 1).astype(np.int64))
    starts, ends = edges[:-1], edges[1:] - 1
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Downsampled(*(_short(part) for part in (steps[ends], low, high, values[ends], averaged[ends])))


def _short(values: FloatArray) -> list[float]:
    """Rounded to seven digits: more than a screen shows, and half the bytes to send."""
    sizes = np.abs(values, where=values != 0, out=np.ones_like(values))
    places = 6 - np.floor(np.log10(sizes))
    # Beyond 10^±15 the scale is not an exact float: such values are not rounded.
    exact = np.abs(places) <= 15
    scale = 10.0 ** np.where(exact, places, 0)
    scaled = np.where(exact, np.rint(values * scale) / scale, values)
    short: list[float] = scaled.tolist()
    return short
