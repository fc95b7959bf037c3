"""Muon's kernels: matmuls whose result is symmetric at half the work, and its momentum and update in one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepstep.models.kernels.cuda import relative_difference
from keepstep.models.kernels.optimizer import compare_halves

_TILE, _DEPTH = 128, 64
_BLOCK = 2048


@triton.jit
def _symmetric_kernel(
    left, right, added, out, size, depth, left_row, left_column, right_row, right_column, batch_stride,
    alpha, beta, diagonal, with_added: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1)
    if column > row:
        return
    batch = tl.program_id(2).to(tl.int64)
    left += batch * batch_stride
    right += batch * batch_stride
    square = batch * size * size
    rows, columns, lanes = row * tile + tl.arange(0, tile), column * tile + tl.arange(0, tile), tl.arange(0, block)
    left_places = left + rows[:, None].to(tl.int64) * left_row + lanes[None, :].to(tl.int64) * left_column
    right_places = right + columns[None, :].to(tl.int64) * right_row + lanes[:, None].to(tl.int64) * right_column
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for _ in range(0, depth, block):
        total = tl.dot(tl.load(left_places), tl.load(right_places), total)
        left_places += block * left_column
        right_places += block * right_column
    total *= alpha
    places = square + rows[:, None].to(tl.int64) * size + columns[None, :]
    if with_added:
        total += beta * tl.load(added + places).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + places, rounded)
    if column < row:
        mirrored = square + columns[:, None].to(tl.int64) * size + rows[None, :]
        tl.store(out + mirrored, tl.trans(rounded))


def fits_tiles(size: int, depth: int) -> bool:
    """Whether `symmetric_matmul` takes these sizes."""
    return size % _TILE == 0 and depth % _DEPTH == 0


def symmetric_matmul(
    left_bsk: Tensor, right_bsk: Tensor, added_bss: Tensor | None, alpha: float, beta: float, diagonal: float
) -> Tensor:
    """alpha · left · rightᵀ + beta · added + diagonal · identity, for a product that is symmetric.

    Only the tiles below and on the diagonal are computed. A matrix has the same bits in a batch of any size. Both sides
    have the same layout from matrix to matrix, and any inside.
    """
    batch, size, depth = left_bsk.shape
    out = left_bsk.new_empty((batch, size, size))
    tiles = size // _TILE
    _symmetric_kernel[(tiles, tiles, batch)](
        left_bsk, right_bsk, added_bss, out, size, depth, *left_bsk.stride()[1:], *right_bsk.stride()[1:],
        left_bsk.stride(0), alpha, beta, diagonal, added_bss is not None, _TILE, _DEPTH, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _momentum_kernel(gradient, momentum, direction, factor, size, beta, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    scale = tl.load(factor)
    # Infinity minus itself is not a number, and that equals nothing.
    counts = tl.where(scale - scale == 0.0, 1.0, 0.0)
    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32) * scale
    g = tl.where(g - g == 0.0, g, 0.0)
    m = tl.load(momentum + places, mask=inside, other=0.0)
    m += (g - m) * ((1 - beta) * counts)
    tl.store(momentum + places, m, mask=inside)
    tl.store(direction + places, (g + beta * (m - g)).to(direction.dtype.element_ty), mask=inside)


def momentum_(gradient: Tensor, momentum: Tensor, direction: Tensor, factor: Tensor, beta: float) -> None:
    """Nesterov momentum in place, and the direction that it gives; unchanged where `factor` is not finite."""
    size = gradient.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    _momentum_kernel[grid](gradient, momentum, direction, factor, size, beta, _BLOCK, num_warps=8)


@triton.jit
def _apply_kernel(high, low, direction, factor, size, keep, step, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    scale, inside = tl.load(factor), places < size
    upper = tl.load(high + places, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
    w = ((upper << 16) + tl.load(low + places, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    moved = w * keep + tl.load(direction + places, mask=inside).to(tl.float32) * step
    w = tl.where(scale - scale == 0.0, moved, w)
    bits = w.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    tl.store(high + places, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    tl.store(low + places, (bits - (upper << 16)).to(tl.int16), mask=inside)


def apply_(halves: tuple[Tensor, Tensor], direction: Tensor, factor: Tensor, keep: float, step: float) -> None:
    """keep · weight + step · direction, for a weight in two halves; unchanged where `factor` is not finite."""
    size = direction.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    _apply_kernel[grid](*halves, direction, factor, size, keep, step, _BLOCK, num_warps=8)


def prove(device: torch.device) -> float:
    """How far the kernels are from torch's operators: the matmul with an operand of each layout, and one update."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(2, 256, 512, generator=generator).bfloat16() / 16
    gradient, momentum, weight = torch.randn(3, 5000, generator=generator)
    return max(_prove_matmul(wide.to(device), wide.float()), _prove_update(device, gradient, momentum, weight))


def _prove_matmul(left: Tensor, exact: Tensor) -> float:
    tall = left.mT.contiguous().mT
    square = symmetric_matmul(left, left, None, 1.0, 0.0, 0.0)
    ours = (
        square,
        symmetric_matmul(tall, tall, None, 1.0, 0.0, 0.0),
        symmetric_matmul(square, square, square, 2.0, -4.0, 3.0),
    )
    gram, rounded = exact @ exact.mT, square.float().cpu()
    polynomial = 2.0 * rounded @ rounded - 4.0 * rounded + 3.0 * torch.eye(exact.shape[1])
    return relative_difference([part.cpu() for part in ours], [gram, gram, polynomial])


def _prove_update(device: torch.device, gradient: Tensor, momentum: Tensor, weight: Tensor) -> float:
    ours, direction = momentum.to(device, copy=True), torch.empty_like(gradient, dtype=torch.bfloat16, device=device)
    high, low = weight.bfloat16().to(device), torch.zeros(weight.shape, dtype=torch.int16, device=device)
    factor = torch.full((), 0.5, device=device)
    momentum_(gradient.to(device), ours, direction, factor, 0.9)
    apply_((high, low), direction, factor, 0.7, -0.3)
    theirs = momentum.lerp(gradient * 0.5, 0.1)
    theirs_direction = (gradient * 0.5).lerp(theirs, 0.9)
    moved = weight.bfloat16().float() * 0.7 - 0.3 * direction.cpu().float()
    pairs = [(ours.cpu(), theirs), (direction.cpu(), theirs_direction), compare_halves((high, low), moved)]
    return relative_difference(*zip(*pairs, strict=True))
