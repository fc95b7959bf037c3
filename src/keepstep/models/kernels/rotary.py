"""Take the fused projection apart and turn queries and keys, in one pass; and its inverse for the gradients.

One program a token. A token's row is a list of heads: a group's query heads, its key head, its value head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_kernel(
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
    turned_first = tl.where(is_value, first, first * c - second * s).to(qkv.dtype.element_ty)
    turned_second = tl.where(is_value, second, second * c + first * s).to(qkv.dtype.element_ty)
    if backward:
        tl.store(fused_at, turned_first, mask=whole)
        tl.store(fused_at + half, turned_second, mask=whole)
    else:
        tl.store(query_at, turned_first, mask=is_query)
        tl.store(query_at + half, turned_second, mask=is_query)
        tl.store(key_at, turned_first, mask=is_key)
        tl.store(key_at + half, turned_second, mask=is_key)
        tl.store(value_at, turned_first, mask=is_value)
        tl.store(value_at + half, turned_second, mask=is_value)


def split_and_turn(
    qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, n, e], keys and values [b, t, g, e] of a contiguous projection."""
    b, t, m = qkv_btm.shape
    groups = m // ((queries + 2) * head_size)
    query = qkv_btm.new_empty(b, t, groups * queries, head_size)
    key, value = (qkv_btm.new_empty(b, t, groups, head_size) for _ in range(2))
    _launch(qkv_btm, (query, key, value), (cos_btf, sin_btf), queries, backward=False)
    return query, key, value


def join_and_turn_back(
    gradients: tuple[Tensor, Tensor, Tensor], cos_btf: Tensor, sin_btf: Tensor, queries: int
) -> Tensor:
    """The gradient of the projection from those of its three parts, whose heads may lie in any order."""
    b, t, groups, head_size = gradients[1].shape
    qkv_btm = gradients[1].new_empty(b, t, groups * (queries + 2) * head_size)
    _launch(qkv_btm, gradients, (cos_btf, sin_btf), queries, backward=True)
    return qkv_btm


def _launch(
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
    _turn_kernel[(b * t,)](
        qkv, *parts, *tables, t, table_stride, slots, *strides, queries, half, block, lanes, backward, num_warps=4
    )
