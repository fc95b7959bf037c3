"""What the fp8 backward pass of experts does between its matmuls, each in one pass over memory.

The tensor cores' fp8 matmuls need both sides contiguous along what is summed over. For gradients of weights these are
the rows of an expert, so their operands are written transposed: the rows of each expert begin at a multiple of 128, and
zeros follow them up to the next one.

Shape legend: n tokens, m rows sorted by expert, r those rows with zeros after each expert's, d hidden, e experts, f
width of an expert; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 64, 64
"""A tile of SwiGLU's backward pass."""
_TILE = 128
_WARPS = 8


@triton.jit
def _run_of(first, ends, until, experts, expert_block: tl.constexpr):
    """How far from its place is the sorted row that belongs at `first`, and where the rows of its expert end."""
    lane = tl.arange(0, expert_block)
    passed = tl.load(until + lane, mask=lane < experts, other=2147483647) <= first
    expert = tl.minimum(tl.sum(passed.to(tl.int32), 0), experts - 1)
    before = tl.maximum(expert - 1, 0)
    moved = tl.where(expert > 0, tl.load(ends + before) - tl.load(until + before), 0)
    return moved, tl.load(ends + expert)


@triton.jit
def _token_bytes(source, order, row, end, column, inside, width, top_k: tl.constexpr):
    token = tl.load(order + row, mask=row < end, other=0) // top_k
    mask = (row < end)[:, None] & inside[None, :]
    return tl.load(source + token[:, None] * width + column[None, :], mask=mask, other=0).to(tl.int16)


@triton.jit
def _spread_transposed_kernel(
    source, order, ends, until, output, width, rows, experts, top_k: tl.constexpr, expert_block: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    # Rows in pairs: there are instructions that transpose two bytes, and none for one.
    pairs: tl.constexpr = tile // 2
    first = tl.program_id(0) * tile
    moved, end = _run_of(first, ends, until, experts, expert_block)
    row = first + moved + 2 * tl.arange(0, pairs)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    even = _token_bytes(source, order, row, end, column, inside, width, top_k)
    odd = _token_bytes(source, order, row + 1, end, column, inside, width, top_k)
    places = column[:, None].to(tl.int64) * (rows // 2) + (first // 2 + tl.arange(0, pairs))[None, :]
    tl.store(output + places, tl.trans((even & 0xFF) | (odd << 8)), mask=inside[:, None])


@triton.jit
def _small(numbers, highest, element: tl.constexpr):
    # Saturate: a value past the largest number would become infinite.
    return tl.minimum(tl.maximum(numbers, -highest), highest).to(element)


@triton.jit
def _swiglu_backward_kernel(
    gradient, gate_up, weight, by_row, by_left, by_right, ends, until, straight, transposed, activation, d_weight,
    width, rows, experts, highest, transposes: tl.constexpr, expert_block: tl.constexpr, block: tl.constexpr,
    columns: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block
    moved, end = _run_of(first, ends, until, experts, expert_block)
    row = first + moved + tl.arange(0, block)
    is_row = row < end
    scale = tl.load(weight + row, mask=is_row, other=0.0)[:, None]
    straight_by = tl.load(by_row + row, mask=is_row, other=0.0)[:, None]
    left_by = tl.load(by_left + row, mask=is_row, other=0.0)[:, None]
    right_by = tl.load(by_right + row, mask=is_row, other=0.0)[:, None]
    element = straight.dtype.element_ty
    wide = row.to(tl.int64)[:, None] * width
    total = tl.zeros((block,), tl.float32)
    for start in tl.range(0, width, columns):
        column = start + tl.arange(0, columns)
        inside = column < width
        both = is_row[:, None] & inside[None, :]
        gate_at = 2 * wide + column[None, :]
        dy = tl.load(gradient + wide + column[None, :], mask=both, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + gate_at, mask=both, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gate_at + width, mask=both, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += tl.sum(dy * silu * up, 1)
        dy *= scale
        d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
        d_up = dy * silu
        tl.store(straight + gate_at, _small(d_gate * straight_by, highest, element), mask=both)
        tl.store(straight + gate_at + width, _small(d_up * straight_by, highest, element), mask=both)
        if transposes:
            # Rows that there are not are zeros here.
            places = column.to(tl.int64)[:, None] * rows + (first + tl.arange(0, block))[None, :]
            kept = inside[:, None]
            ups = transposed + width.to(tl.int64) * rows
            # As two bytes, which there are instructions to transpose for.
            d_gate = tl.trans((d_gate * left_by).to(tl.bfloat16)).to(tl.float32)
            tl.store(transposed + places, _small(d_gate, highest, element), mask=kept)
            d_up = tl.trans((d_up * left_by).to(tl.bfloat16)).to(tl.float32)
            tl.store(ups + places, _small(d_up, highest, element), mask=kept)
            product = tl.trans((silu * up * scale * right_by).to(tl.bfloat16)).to(tl.float32)
            tl.store(activation + places, _small(product, highest, element), mask=kept)
    tl.store(d_weight + row, total, mask=is_row)


@triton.jit
def _transposed_weights_kernel(source, undo, output, height, width, highest, tile: tl.constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    expert = tl.program_id(2).to(tl.int64) * height * width
    places = row[:, None] * width + column[None, :]
    x = tl.load(source + expert + places, mask=(row[:, None] < height) & (column[None, :] < width), other=0.0)
    # Rounded right, as where they are quantized without being transposed.
    x = tl.math.div_rn(x.to(tl.float32), tl.load(undo + tl.program_id(2)))
    small = _small(x, highest, output.dtype.element_ty)
    transposed = column[:, None] * height + row[None, :]
    tl.store(output + expert + transposed, tl.trans(small), mask=(column[:, None] < width) & (row[None, :] < height))


def spread_transposed(
    source8_nd: Tensor, order_m: Tensor, runs: tuple[Tensor, Tensor], top_k: int, rows: int
) -> Tensor:
    """Token order_m[i] // top_k for each sorted row i, [d, r], of numbers of one byte."""
    width, (ends_e, until_e) = source8_nd.shape[1], runs
    experts = ends_e.shape[0]
    output = source8_nd.new_empty((width, rows))
    if output.numel():
        grid = (rows // _TILE, triton.cdiv(width, _TILE))
        _spread_transposed_kernel[grid](
            source8_nd.view(torch.int8), order_m, ends_e, until_e, output.view(torch.int16), width, rows, experts,
            top_k, triton.next_power_of_2(experts), _TILE, num_warps=_WARPS,
        )  # fmt: skip
    return output


def swiglu_backward_fp8(
    gradient_mf: Tensor, gate_up_mf: Tensor, row_factors: Sequence[Tensor], runs: tuple[Tensor, Tensor], rows: int,
    transposes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Weighted SwiGLU's gradients: of gates and ups, straight and transposed, the activation, transposed, of weights.

    `row_factors` are the weights, and what each of the first three is multiplied by. Without `transposes`, what would
    be transposed is empty.
    """
    (m, width), (ends_e, until_e) = gradient_mf.shape, runs
    experts, kept = ends_e.shape[0], rows * transposes
    straight = gate_up_mf.new_empty(gate_up_mf.shape, dtype=torch.float8_e5m2)
    transposed, activation = (straight.new_empty((size, kept)) for size in (2 * width, width))
    d_weight = row_factors[0].new_empty(m)
    _swiglu_backward_kernel[(rows // _ROWS,)](
        gradient_mf, gate_up_mf, *row_factors, ends_e, until_e, straight, transposed, activation, d_weight, width, rows,
        experts, torch.finfo(straight.dtype).max, transposes, triton.next_power_of_2(experts), _ROWS, _COLUMNS,
        num_warps=_WARPS,
    )  # fmt: skip
    return straight, transposed, activation, d_weight


def transposed_weights(weights_enk: Tensor, undo_e: Tensor) -> Tensor:
    """Weights in e4m3, those of each expert divided by its factor and transposed, [e, k, n]."""
    experts, height, width = weights_enk.shape
    output = weights_enk.new_empty((experts, width, height), dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(height, _TILE), triton.cdiv(width, _TILE), experts)
    highest = torch.finfo(output.dtype).max
    _transposed_weights_kernel[grid](weights_enk, undo_e, output, height, width, highest, _TILE, num_warps=_WARPS)
    return output
