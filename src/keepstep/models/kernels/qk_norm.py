"""Normalised queries and keys in one pass each way: split the fused projection into heads, RMS norm, rope.

Inductor reads the projection once for the sums and once more for the heads, copies the values, and writes the gradient
in parts that it then joins. Here one program has a token's whole row, a list of heads: a group's query heads, its key
head, its value head. The norm is over each head, or over all query heads and over all key heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[Tensor, Tensor]
_PROGRAMS_PER_PROCESSOR = 4
_WARPS = 8


@triton.jit
def _kinds(slots, queries, block: tl.constexpr):
    """For each head of a row: its group, its number among those of its kind, and whether it is query, key or value."""
    slot = tl.arange(0, block)[:, None]
    group, place = slot // (queries + 2), slot % (queries + 2)
    exists = slot < slots
    is_query, is_key = exists & (place < queries), exists & (place == queries)
    number = tl.where(is_query, group * queries + place, group)
    return slot, number, is_query, is_key, exists & (place > queries)


@triton.jit
def _weights(query_weight, key_weight, number, is_query, is_key, lane, half, per_head: tl.constexpr):
    """Both halves of each head's weight; zero for values."""
    at = lane if per_head else number * (2 * half) + lane
    query, key = is_query & (lane < half), is_key & (lane < half)
    first = tl.load(query_weight + at, mask=query, other=0.0) + tl.load(key_weight + at, mask=key, other=0.0)
    at += half
    second = tl.load(query_weight + at, mask=query, other=0.0) + tl.load(key_weight + at, mask=key, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _mean(sums, is_query, is_key, slots, queries, half, per_head: tl.constexpr):
    """What a norm divides by its width: of a head alone, or of all heads of its kind."""
    if per_head:
        return sums / (2 * half)
    groups = slots // (queries + 2)
    query = tl.sum(tl.where(is_query, sums, 0.0)) / (groups * queries * 2 * half)
    key = tl.sum(tl.where(is_key, sums, 0.0)) / (groups * 2 * half)
    return tl.where(is_query, query, key)


@triton.jit
def _forward_kernel(
    qkv, query_weight, key_weight, cos, sin, query, key, value, tokens, table_stride, slots, queries, half, eps,
    per_head: tl.constexpr, with_rope: tl.constexpr, block: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)[None, :]
    slot, number, is_query, is_key, is_value = _kinds(slots, queries, block)
    inside = (slot < slots) & (lane < half)
    at = row * slots * (2 * half) + slot * (2 * half) + lane
    first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + half, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1, keep_dims=True)
    inverse = tl.rsqrt(_mean(squares, is_query, is_key, slots, queries, half, per_head) + eps)
    by_first, by_second = _weights(query_weight, key_weight, number, is_query, is_key, lane, half, per_head)
    # Rounded, as between a norm and rope on their own.
    element = qkv.dtype.element_ty
    one = (first * inverse * by_first).to(element).to(tl.float32)
    two = (second * inverse * by_second).to(element).to(tl.float32)
    if with_rope:
        angle = row // tokens * table_stride + row % tokens * half + lane
        c = tl.load(cos + angle, mask=lane < half, other=0.0)
        s = tl.load(sin + angle, mask=lane < half, other=0.0)
        one, two = one * c - two * s, two * c + one * s
    one, two = tl.where(is_value, first, one).to(element), tl.where(is_value, second, two).to(element)
    groups = slots // (queries + 2)
    query_at = (row * groups * queries + number) * (2 * half) + lane
    other_at = (row * groups + number) * (2 * half) + lane
    tl.store(query + query_at, one, mask=is_query & inside)
    tl.store(query + query_at + half, two, mask=is_query & inside)
    tl.store(key + other_at, one, mask=is_key & inside)
    tl.store(key + other_at + half, two, mask=is_key & inside)
    tl.store(value + other_at, one, mask=is_value & inside)
    tl.store(value + other_at + half, two, mask=is_value & inside)


@triton.jit
def _backward_kernel(
    gradient, qkv, query_weight, key_weight, cos, sin, d_qkv, weight_sums, rows, rows_each, tokens, table_stride,
    slots, queries, half, eps,
    per_head: tl.constexpr, with_rope: tl.constexpr, block: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, lanes)[None, :]
    slot, number, is_query, is_key, is_value = _kinds(slots, queries, block)
    exists = (slot < slots) & (lane < half)
    place = slot * (2 * half) + lane
    by_first, by_second = _weights(query_weight, key_weight, number, is_query, is_key, lane, half, per_head)
    total_first, total_second = tl.zeros((block, lanes), tl.float32), tl.zeros((block, lanes), tl.float32)
    program = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    for turn in range(rows_each):
        row = program + turn * tl.num_programs(0)
        inside = exists & (row < rows)
        at = row * slots * (2 * half) + place
        d_first = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        d_second = tl.load(gradient + at + half, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(qkv + at + half, mask=inside, other=0.0).to(tl.float32)
        one, two = d_first, d_second
        if with_rope:
            angle = row // tokens * table_stride + row % tokens * half + lane
            c = tl.load(cos + angle, mask=(lane < half) & (row < rows), other=0.0)
            s = tl.load(sin + angle, mask=(lane < half) & (row < rows), other=0.0)
            one, two = one * c + two * s, two * c - one * s
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        inverse = tl.rsqrt(_mean(squares, is_query, is_key, slots, queries, half, per_head) + eps)
        unit_first, unit_second = first * inverse, second * inverse
        total_first += one * unit_first
        total_second += two * unit_second
        one, two = one * by_first, two * by_second
        along = tl.sum(one * unit_first + two * unit_second, 1, keep_dims=True)
        along = _mean(along, is_query, is_key, slots, queries, half, per_head)
        one = tl.where(is_value, d_first, inverse * (one - unit_first * along))
        two = tl.where(is_value, d_second, inverse * (two - unit_second * along))
        tl.store(d_qkv + at, one.to(d_qkv.dtype.element_ty), mask=inside)
        tl.store(d_qkv + at + half, two.to(d_qkv.dtype.element_ty), mask=inside)
    sums = weight_sums + program * slots * (2 * half) + place
    tl.store(sums, total_first, mask=exists)
    tl.store(sums + half, total_second, mask=exists)


def split_norm_rope(
    qkv_btm: Tensor, weights: Pair, tables: Pair | None, queries: int, head_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, n, e], keys and values [b, t, g, e] of a contiguous projection."""
    b, t, m = qkv_btm.shape
    groups = m // head_size // (queries + 2)
    query = qkv_btm.new_empty(b, t, groups * queries, head_size)
    key, value = (qkv_btm.new_empty(b, t, groups, head_size) for _ in range(2))
    _forward_kernel[(b * t,)](
        qkv_btm, *weights, *(tables or (None, None)), query, key, value, t,
        *_sizes(qkv_btm, weights, tables, queries, head_size, eps), num_warps=_WARPS,
    )  # fmt: skip
    return query, key, value


def split_norm_rope_backward(
    gradient_btm: Tensor, qkv_btm: Tensor, weights: Pair, tables: Pair | None, queries: int, head_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projection and of both weights, from that of the heads in the projection's own order."""
    b, t, m = qkv_btm.shape
    processors = torch.cuda.get_device_properties(qkv_btm.device).multi_processor_count
    programs = min(b * t, processors * _PROGRAMS_PER_PROCESSOR)
    d_qkv_btm = torch.empty_like(qkv_btm)
    sums = torch.empty(programs, m, dtype=torch.float32, device=qkv_btm.device)
    _backward_kernel[(programs,)](
        gradient_btm, qkv_btm, *weights, *(tables or (None, None)), d_qkv_btm, sums, b * t,
        triton.cdiv(b * t, programs), t, *_sizes(qkv_btm, weights, tables, queries, head_size, eps), num_warps=_WARPS,
    )  # fmt: skip
    total = sums.sum(0).view(-1, queries + 2, head_size)
    d_query, d_key = total[:, :queries].reshape(-1, head_size), total[:, queries]
    if weights[0].numel() == head_size:
        d_query, d_key = d_query.sum(0), d_key.sum(0)
    return d_qkv_btm, d_query.flatten().to(weights[0].dtype), d_key.flatten().to(weights[1].dtype)


def _sizes(
    qkv: Tensor, weights: Pair, tables: Pair | None, queries: int, head_size: int, eps: float
) -> tuple[Any, ...]:
    """The arguments at the end of both kernels."""
    slots, half = qkv.shape[-1] // head_size, head_size // 2
    # One table for all rows, or one a row where documents start at places of their own.
    table_stride = 0 if tables is None or tables[0].shape[0] == 1 else tables[0].stride(0)
    per_head, blocks = weights[0].numel() == head_size, [triton.next_power_of_2(size) for size in (slots, half)]
    return table_stride, slots, queries, half, eps, per_head, tables is not None, *blocks
