"""RMS norm with the residual sum before it, forward and backward, each in one pass over the residual stream.

The backward kernel also adds the gradient that reaches the stream past the norm, and sums the weight's gradient over
the rows that a program walks; Inductor needs up to twice the time for the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_PER_PROCESSOR = 8
"""Enough rows in flight to fill the memory's pipes, few enough partial sums."""


@triton.jit
def _forward_kernel(
    x, added, weight, stream, normed, inverses, width, eps, with_added: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    inside = lanes < width
    places = row * width + lanes
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if with_added:
        value += tl.load(added + places, mask=inside, other=0.0).to(tl.float32)
        # The backward pass will see what was stored: normalise that.
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + places, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(inverses + row, inverse)
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + places, (value * inverse * scale).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    d_normed, d_stream, stream, inverses, weight, dx, weight_sums, rows, rows_each, width, block: tl.constexpr
):  # fmt: skip
    lanes = tl.arange(0, block)
    exists = lanes < width
    scale = tl.load(weight + lanes, mask=exists, other=0.0).to(tl.float32)
    total = tl.zeros((block,), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for turn in range(rows_each):
        row = program + turn * tl.num_programs(0)
        inside = exists & (row < rows)
        places = row * width + lanes
        dy = tl.load(d_normed + places, mask=inside, other=0.0).to(tl.float32)
        past = tl.load(d_stream + places, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
        unit = tl.load(stream + places, mask=inside, other=0.0).to(tl.float32) * inverse
        total += dy * unit
        dy *= scale
        gradient = past + inverse * (dy - unit * (tl.sum(dy * unit, 0) / width))
        tl.store(dx + places, gradient.to(dx.dtype.element_ty), mask=inside)
    tl.store(weight_sums + program * width + lanes, total, mask=exists)


def rms_norm_forward(
    x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream (x itself where nothing is added), its norm, and the fp32 inverse root of each row's mean square."""
    rows, width = x_md.shape
    stream_md = x_md if added_md is None else torch.empty_like(x_md)
    normed_md = torch.empty_like(x_md)
    inverses_m = torch.empty(rows, dtype=torch.float32, device=x_md.device)
    block = triton.next_power_of_2(width)
    _forward_kernel[(rows,)](
        x_md, added_md, weight_d, stream_md, normed_md, inverses_m, width, eps, added_md is not None, block,
        num_warps=_warps(block, 16),
    )  # fmt: skip
    return stream_md, normed_md, inverses_m


def rms_norm_backward(
    d_normed_md: Tensor, d_stream_md: Tensor, stream_md: Tensor, inverses_m: Tensor, weight_d: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the stream, what passed the norm by included, and of the weight."""
    rows, width = stream_md.shape
    processors = torch.cuda.get_device_properties(stream_md.device).multi_processor_count
    programs = min(rows, processors * _PROGRAMS_PER_PROCESSOR)
    dx_md = torch.empty_like(stream_md)
    sums = torch.empty(programs, width, dtype=torch.float32, device=stream_md.device)
    block = triton.next_power_of_2(width)
    _backward_kernel[(programs,)](
        d_normed_md, d_stream_md, stream_md, inverses_m, weight_d, dx_md, sums, rows,
        triton.cdiv(rows, programs), width, block,
        num_warps=_warps(block, 8),
    )  # fmt: skip
    return dx_md, sums.sum(0).to(weight_d.dtype)


def _warps(block: int, numbers_per_thread: int) -> int:
    return max(1, min(16, block // (32 * numbers_per_thread)))
