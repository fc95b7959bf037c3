"""What a block computes between its matmuls, each in one pass: RMS norm, SwiGLU and rope.

Inductor needs up to twice the time for the same bytes:
- The RMS norm adds the residual before it. Its backward kernel also adds the gradient that reaches the stream past the
  norm, and sums the weight's gradient over the rows that a program walks.
- SwiGLU works on the blocked layout of `gate_up`. Inductor writes the backward of the split as a stack and reads every
  operand twice.
- Rope is applied while the fused projection is split, one program a token; and the inverse for the gradients. A token's
  row is a list of heads: a group's query heads, its key head, its value head.

`kernels/fp8.py` has what fp8 matmuls need in their place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepstep.models.kernels.fp8 import raise_to

_NUMBERS_IN_FLIGHT = 8192
"""For each multiprocessor, in four to eight rows: enough to fill the memory's pipes, few enough partial sums."""
_SUMMED_ROWS, _SUMMED_COLUMNS = 256, 8
_BLOCK = 1024
_GROUPS = 4
"""Runs of one width that a program works on."""


@triton.jit
def _norm_forward_kernel(
    x, added, weight, stream, normed, inverses, largest, width, eps,
    with_added: tl.constexpr, with_normed: tl.constexpr, block: tl.constexpr,
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
    output = value * inverse * scale
    if with_normed:
        tl.store(normed + places, output.to(normed.dtype.element_ty), mask=inside)
    else:
        raise_to(largest, tl.max(tl.abs(output)))


@triton.jit
def _norm_backward_kernel(
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


@triton.jit
def _column_sums_kernel(numbers, sums, rows, width, tall: tl.constexpr, wide: tl.constexpr):
    lane = tl.program_id(0) * wide + tl.arange(0, wide)[None, :]
    total = tl.zeros((tall, wide), tl.float32)
    for start in range(0, rows, tall):
        row = start + tl.arange(0, tall)[:, None]
        total += tl.load(numbers + row * width + lane, mask=(row < rows) & (lane < width), other=0.0)
    tl.store(sums + lane, tl.sum(total, 0)[None, :].to(sums.dtype.element_ty), mask=lane < width)


def rms_norm_forward(
    x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream (x itself where nothing is added), its norm, and the fp32 inverse root of each row's mean square."""
    normed_md = torch.empty_like(x_md)
    stream_md, inverses_m = _norm_forward(x_md, added_md, weight_d, eps, normed_md, None)
    return stream_md, normed_md, inverses_m


def rms_norm_statistics(
    x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the largest magnitude of the norm in place of the norm."""
    largest = torch.zeros((), dtype=torch.float32, device=x_md.device)
    return *_norm_forward(x_md, added_md, weight_d, eps, None, largest), largest


def _norm_forward(
    x_md: Tensor,
    added_md: Tensor | None,
    weight_d: Tensor,
    eps: float,
    normed_md: Tensor | None,
    largest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, width = x_md.shape
    stream_md = x_md if added_md is None else torch.empty_like(x_md)
    inverses_m = torch.empty(rows, dtype=torch.float32, device=x_md.device)
    block = triton.next_power_of_2(width)
    _norm_forward_kernel[(rows,)](
        x_md, added_md, weight_d, stream_md, normed_md, inverses_m, largest, width, eps,
        added_md is not None, normed_md is not None, block, num_warps=_warps(block, 16),
    )  # fmt: skip
    return stream_md, inverses_m


def rms_norm_backward(
    d_normed_md: Tensor, d_stream_md: Tensor, stream_md: Tensor, inverses_m: Tensor, weight_d: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the stream, what passed the norm by included, and of the weight."""
    rows, width = stream_md.shape
    processors = torch.cuda.get_device_properties(stream_md.device).multi_processor_count
    block = triton.next_power_of_2(width)
    programs = min(rows, processors * max(4, min(8, _NUMBERS_IN_FLIGHT // block)))
    dx_md = torch.empty_like(stream_md)
    sums = torch.empty(programs, width, dtype=torch.float32, device=stream_md.device)
    _norm_backward_kernel[(programs,)](
        d_normed_md, d_stream_md, stream_md, inverses_m, weight_d, dx_md, sums, rows,
        triton.cdiv(rows, programs), width, block,
        num_warps=_warps(block, 8),
    )  # fmt: skip
    d_weight = torch.empty_like(weight_d)
    _column_sums_kernel[(triton.cdiv(width, _SUMMED_COLUMNS),)](
        sums, d_weight, programs, width, _SUMMED_ROWS, _SUMMED_COLUMNS, num_warps=8
    )
    return dx_md, d_weight


def _warps(block: int, numbers_per_thread: int) -> int:
    return max(1, min(16, block // (32 * numbers_per_thread)))


@triton.jit
def _places(count, width, groups: tl.constexpr, block: tl.constexpr):
    """Offsets of outputs, of their gates and ups in the fused input, and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)[:, None]
    lanes = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    gate = group * (2 * width) + lanes
    return group * width + lanes, gate, gate + width, (lanes < width) & (group < count)


@triton.jit
def _swiglu_forward_kernel(fused, output, count, width, groups: tl.constexpr, block: tl.constexpr):
    index, gate_place, up_place, inside = _places(count, width, groups, block)
    gate = tl.load(fused + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + up_place, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + index, product.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gradient, fused, output, count, width, groups: tl.constexpr, block: tl.constexpr):
    index, gate_place, up_place, inside = _places(count, width, groups, block)
    dy = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(fused + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + up_place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = dy * gate * sigmoid
    tl.store(output + gate_place, d_gate.to(output.dtype.element_ty), mask=inside)
    tl.store(output + up_place, d_up.to(output.dtype.element_ty), mask=inside)


def swiglu_forward(fused_mf: Tensor, width: int) -> Tensor:
    """silu(gate) × up of [..., 2f] in blocks of `width`."""
    output = fused_mf.new_empty(*fused_mf.shape[:-1], fused_mf.shape[-1] // 2)
    count = output.numel() // width
    _swiglu_forward_kernel[_grid(count, width)](fused_mf, output, count, width, _GROUPS, _BLOCK, num_warps=8)
    return output


def swiglu_backward(dy_mf: Tensor, fused_mf: Tensor, width: int) -> Tensor:
    """The gradient of the fused input."""
    output = torch.empty_like(fused_mf)
    count = dy_mf.numel() // width
    _swiglu_backward_kernel[_grid(count, width)](dy_mf, fused_mf, output, count, width, _GROUPS, _BLOCK, num_warps=8)
    return output


def _grid(count: int, width: int) -> tuple[int, int]:
    return triton.cdiv(count, _GROUPS), triton.cdiv(width, _BLOCK)


@triton.jit
def _split_rope_kernel(
    qkv, query, key, value, cos, sin, tokens, table_stride, slots,
    query_b, query_t, query_n, key_b, key_t, key_n, value_b, value_t, value_n,
    queries: tl.constexpr, half: tl.constexpr, block: tl.constexpr, lanes: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    slot = tl.arange(0, block)[:, None]
    lane = tl.arange(0, lanes)[None, :]
    group, place = slot // (queries + 2), slot % (queries + 2)
    whole = (slot < slots) & (lane < half)
    is_query, is_key, is_value = whole & (place < queries), whole & (place == queries), whole & (place > queries)
    fused_at = qkv + row * slots * (2 * half) + slot * (2 * half) + lane
    query_at = query + batch * query_b + token * query_t + (group * queries + place) * query_n + lane
    key_at = key + batch * key_b + token * key_t + group * key_n + lane
    value_at = value + batch * value_b + token * value_t + group * value_n + lane
    angle = batch * table_stride + token * half + lane
    c, s = tl.load(cos + angle, mask=lane < half), tl.load(sin + angle, mask=lane < half)
    if backward:
        first = tl.load(query_at, mask=is_query, other=0.0) + tl.load(key_at, mask=is_key, other=0.0)
        first = (first + tl.load(value_at, mask=is_value, other=0.0)).to(tl.float32)
        second = tl.load(query_at + half, mask=is_query, other=0.0) + tl.load(key_at + half, mask=is_key, other=0.0)
        second = (second + tl.load(value_at + half, mask=is_value, other=0.0)).to(tl.float32)
        s = -s
    else:
        first = tl.load(fused_at, mask=whole, other=0.0).to(tl.float32)
        second = tl.load(fused_at + half, mask=whole, other=0.0).to(tl.float32)
    rope_first = tl.where(is_value, first, first * c - second * s).to(qkv.dtype.element_ty)
    rope_second = tl.where(is_value, second, second * c + first * s).to(qkv.dtype.element_ty)
    if backward:
        tl.store(fused_at, rope_first, mask=whole)
        tl.store(fused_at + half, rope_second, mask=whole)
    else:
        tl.store(query_at, rope_first, mask=is_query)
        tl.store(query_at + half, rope_second, mask=is_query)
        tl.store(key_at, rope_first, mask=is_key)
        tl.store(key_at + half, rope_second, mask=is_key)
        tl.store(value_at, rope_first, mask=is_value)
        tl.store(value_at + half, rope_second, mask=is_value)


def split_apply_rope(
    qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, n, e], keys and values [b, t, g, e] of a contiguous projection."""
    b, t, m = qkv_btm.shape
    groups = m // ((queries + 2) * head_size)
    query = qkv_btm.new_empty(b, t, groups * queries, head_size)
    key, value = (qkv_btm.new_empty(b, t, groups, head_size) for _ in range(2))
    _launch_split_rope(qkv_btm, (query, key, value), (cos_btf, sin_btf), queries, backward=False)
    return query, key, value


def merge_rope_backward(
    gradients: tuple[Tensor, Tensor, Tensor], cos_btf: Tensor, sin_btf: Tensor, queries: int
) -> Tensor:
    """The gradient of the projection from those of its three parts, whose heads may be in any order."""
    b, t, groups, head_size = gradients[1].shape
    qkv_btm = gradients[1].new_empty(b, t, groups * (queries + 2) * head_size)
    _launch_split_rope(qkv_btm, gradients, (cos_btf, sin_btf), queries, backward=True)
    return qkv_btm


def _launch_split_rope(
    qkv: Tensor, parts: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], queries: int, backward: bool
) -> None:
    b, t, m = qkv.shape
    half = parts[0].shape[-1] // 2
    parts = tuple(part if part.stride(-1) == 1 else part.contiguous() for part in parts)  # type: ignore[assignment]
    slots = m // (2 * half)
    # One table for all rows, or one a row where documents start at places of their own.
    table_stride = 0 if tables[0].shape[0] == 1 else t * half
    strides = [stride for part in parts for stride in part.stride()[:3]]
    block, lanes = triton.next_power_of_2(slots), triton.next_power_of_2(half)
    _split_rope_kernel[(b * t,)](
        qkv, *parts, *tables, t, table_stride, slots, *strides, queries, half, block, lanes, backward, num_warps=4
    )
