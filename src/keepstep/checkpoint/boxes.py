"""Boxes: the part of a tensor that one process holds, as an offset and a shape. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What two boxes share, or None."""
        offset, shape = [], []
        for mine, my_size, theirs, their_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(mine, theirs), min(mine + my_size, theirs + their_size)
            if stop <= start:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of a tensor that holds `outer`."""
        return tuple(
            slice(mine - base, mine - base + size)
            for mine, size, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """None when `boxes` tile a tensor of `shape`: inside it, no overlap, nothing left out. Else what is wrong.

    Boxes that lie inside, do not overlap and add up to the number of elements must cover every one of them.
    """
    full = whole(shape)
    filled = [box for box in boxes if box.count]
    for box in filled:
        if len(box.offset) != len(full.shape) or box.common(full) != box:
            return f"the part at {list(box.offset)} of shape {list(box.shape)} lies outside shape {list(shape)}"
    # A sweep along the first dimension: only parts that still reach into the current row can overlap the next one.
    active: list[Box] = []
    for box in sorted(filled):
        if shape:
            active = [other for other in active if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in active:
            if other.common(box) is not None:
                return f"the parts at {list(other.offset)} and {list(box.offset)} overlap"
        active.append(box)
    covered = sum(box.count for box in filled)
    if covered != full.count:
        return f"{covered} of {full.count} elements are there"
    return None


def row_runs(inner: Box, outer: Box, item_bytes: int) -> tuple[int, int]:
    """First and last byte (exclusive) of `inner` in the row-major bytes of `outer`: the span that must be read."""
    first = last = 0
    stride = item_bytes
    for dim in reversed(range(len(outer.shape))):
        start = inner.offset[dim] - outer.offset[dim]
        first += start * stride
        last += (start + inner.shape[dim] - 1) * stride
        stride *= outer.shape[dim]
    return first, last + item_bytes
