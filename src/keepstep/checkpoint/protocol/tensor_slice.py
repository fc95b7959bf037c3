"""Slices: the part of a tensor that one process holds, as an offset and a shape. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class TensorSlice:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: TensorSlice) -> TensorSlice | None:
        """The intersection of two slices, or None."""
        offset, shape = [], []
        for mine, my_size, theirs, their_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(mine, theirs), min(mine + my_size, theirs + their_size)
            if stop <= start:
                return None
            offset.append(start)
            shape.append(stop - start)
        return TensorSlice(tuple(offset), tuple(shape))

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """This slice as an index into a tensor that holds `outer`."""
        return tuple(
            slice(mine - base, mine - base + size)
            for mine, size, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )


def whole(shape: Sequence[int]) -> TensorSlice:
    """The slice that covers a whole tensor."""
    return TensorSlice((0,) * len(shape), tuple(shape))


def coverage_problem(shape: Sequence[int], slices: Sequence[TensorSlice]) -> str | None:
    """None when `slices` tile a tensor of `shape`; else what is wrong.

    Slices that are inside the tensor, do not overlap and add up to its number of elements cover all of it.
    """
    full = whole(shape)
    filled = [part for part in slices if part.count]
    for part in filled:
        if not len(part.offset) == len(part.shape) == len(full.shape) or part.intersection(full) != part:
            return f"the part at {list(part.offset)} of shape {list(part.shape)} is outside shape {list(shape)}"
    # Sweep along the first dimension: only slices that reach into the current row can overlap the next one.
    active: list[TensorSlice] = []
    for part in sorted(filled):
        if shape:
            active = [other for other in active if other.offset[0] + other.shape[0] > part.offset[0]]
        for other in active:
            if other.intersection(part) is not None:
                return f"the parts at {list(other.offset)} and {list(part.offset)} overlap"
        active.append(part)
    covered = sum(part.count for part in filled)
    if covered != full.count:
        return f"{covered} of {full.count} elements are present"
    return None


def byte_span(inner: TensorSlice, outer: TensorSlice, item_bytes: int) -> tuple[int, int]:
    """The span of bytes [first, last) that contains `inner` in the row-major bytes of `outer`."""
    first = last = 0
    stride = item_bytes
    for dim in reversed(range(len(outer.shape))):
        start = inner.offset[dim] - outer.offset[dim]
        first += start * stride
        last += (start + inner.shape[dim] - 1) * stride
        stride *= outer.shape[dim]
    return first, last + item_bytes
