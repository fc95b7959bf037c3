"""Kernels for weights and activations in few bits: NF4 to bf16, tokens to fp8, and fp8 transposed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_TILE_WORDS = 32
_NF4_BLOCK_BYTES = 32
_FP8_MAX = 448.0


@triton.jit
def _nf4_kernel(codes, scales, table, out, size, block_bytes: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    pair = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + place // block_bytes, mask=inside, other=0.0)
    first, second = tl.load(table + (pair >> 4)) * scale, tl.load(table + (pair & 15)) * scale
    both = tl.interleave(first, second).to(out.dtype.element_ty)
    numbers = tl.program_id(0).to(tl.int64) * (2 * block) + tl.arange(0, 2 * block)
    tl.store(out + numbers, both, mask=numbers < 2 * size)


def dequantize_nf4(codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in their order; a byte holds two, the first in its high bits, and 32 bytes share a scale."""
    out = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
    grid = (triton.cdiv(codes.numel(), _BLOCK),)
    _nf4_kernel[grid](codes, scales, table, out, codes.numel(), _NF4_BLOCK_BYTES, _BLOCK, num_warps=8)
    return out


@triton.jit
def _rows_kernel(
    source, factors, out, scales, columns, highest, with_factors: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * columns
    largest = tl.zeros((block,), dtype=tl.float32)
    for first in range(0, columns, block):
        lane = first + tl.arange(0, block)
        value = tl.load(source + row + lane, mask=lane < columns, other=0.0).to(tl.float32)
        if with_factors:
            value *= tl.load(factors + lane, mask=lane < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / highest
    tl.store(scales + tl.program_id(0), scale)
    # The row is read again from the cache.
    for first in range(0, columns, block):
        lane = first + tl.arange(0, block)
        value = tl.load(source + row + lane, mask=lane < columns, other=0.0).to(tl.float32)
        if with_factors:
            value *= tl.load(factors + lane, mask=lane < columns, other=0.0)
        small = tl.minimum(tl.maximum(value / scale, -highest), highest)
        tl.store(out + row + lane, small.to(out.dtype.element_ty), mask=lane < columns)


def quantize_rows(source: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row in fp8, its largest magnitude filling the format, and what undoes its scale."""
    rows, columns = source.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=source.device)
    scales = torch.empty(rows, dtype=torch.float32, device=source.device)
    _rows_kernel[(rows,)](
        source, factors, out, scales, columns, _FP8_MAX, factors is not None, _BLOCK, num_warps=8
    )  # fmt: skip
    return out, scales


@triton.jit
def _transpose_kernel(source, out, rows, columns, tile: tl.constexpr):
    # Both matrices are read as words of four numbers: `row` and `column` count words.
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    read = source + (row[:, None] * 4).to(tl.int64) * columns + column[None, :]
    a = tl.load(read, mask=inside, other=0)
    b = tl.load(read + columns, mask=inside, other=0)
    c = tl.load(read + 2 * columns, mask=inside, other=0)
    d = tl.load(read + 3 * columns, mask=inside, other=0)
    # Four by four numbers are exchanged inside registers: first pairs, then pairs of pairs.
    ab_even, ab_odd = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8), ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)
    cd_even, cd_odd = (c & 0x00FF00FF) | ((d & 0x00FF00FF) << 8), ((c >> 8) & 0x00FF00FF) | (d & 0xFF00FF00)
    write = out + (column[:, None] * 4).to(tl.int64) * rows + row[None, :]
    there = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(write, tl.trans((ab_even & 0xFFFF) | (cd_even << 16)), mask=there)
    tl.store(write + rows, tl.trans((ab_odd & 0xFFFF) | (cd_odd << 16)), mask=there)
    tl.store(write + 2 * rows, tl.trans((ab_even >> 16) | (cd_even & 0xFFFF0000)), mask=there)
    tl.store(write + 3 * rows, tl.trans((ab_odd >> 16) | (cd_odd & 0xFFFF0000)), mask=there)


def transpose_bytes(source: Tensor) -> Tensor:
    """A contiguous transposed copy of a matrix of one-byte numbers, whose sizes are multiples of 4."""
    rows, columns = source.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=source.device)
    words = rows // 4, columns // 4
    grid = (triton.cdiv(words[0], _TILE_WORDS), triton.cdiv(words[1], _TILE_WORDS))
    _transpose_kernel[grid](source.view(torch.uint32), out.view(torch.uint32), *words, _TILE_WORDS, num_warps=4)
    return out.view(source.dtype)
