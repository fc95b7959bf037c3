"""To fp8 and, in the same pass, to fp8 transposed: Hopper's fp8 products want both sides contiguous along their sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128


@triton.jit
def _both_kernel(source, straight, turned, largest, undo, rows, columns, highest, tile: tl.constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    places = row[:, None].to(tl.int64) * columns + column[None, :]
    top = tl.maximum(tl.load(largest), 1e-12)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(undo, top / highest)
    x = tl.load(source + places, mask=inside, other=0.0).to(tl.float32) * (highest / top)
    # Saturate: a value past the largest number would become infinite, or no number at all.
    small = tl.minimum(tl.maximum(x, -highest), highest).to(straight.dtype.element_ty)
    tl.store(straight + places, small, mask=inside)
    turned_places = column[:, None].to(tl.int64) * rows + row[None, :]
    turned_inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(turned + turned_places, tl.trans(small), mask=turned_inside)


def quantise_both(source: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`source` [rows, columns] as fp8 with `largest` at the end of its range, the same transposed, and what undoes it.

    The scale is found inside: on its own it would be three launches of a microsecond's work, for every operand.
    """
    rows, columns = source.shape
    straight = torch.empty(rows, columns, dtype=dtype, device=source.device)
    turned = torch.empty(columns, rows, dtype=dtype, device=source.device)
    undo = torch.empty((), dtype=torch.float32, device=source.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    highest = torch.finfo(dtype).max
    _both_kernel[grid](source, straight, turned, largest, undo, rows, columns, highest, _TILE, num_warps=8)
    return straight, turned, undo
