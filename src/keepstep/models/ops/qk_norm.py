"""Queries and keys that are normalised and rotated, from the fused projection and back, in one pass each way.

Shape legend: b rows, t tokens, m rows of the fused projection, g key-value heads, n query heads, e head size,
f rotary frequencies (half a head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import relative_difference
from keepstep.models.ops.backend import proven
from keepstep.models.positions import apply_rope

Pair = tuple[Tensor, Tensor]
Parts = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("keepstep::split_norm_rope", mutates_args=())
def split_norm_rope(
    qkv_btm: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos_btf: Tensor | None,
    sin_btf: Tensor | None,
    queries_per_group: int,
    head_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, n, e] and keys [b, t, g, e] with norm and rope; values [b, t, g, e].

    A weight of `head_size` numbers is that of every head; otherwise all heads are one vector for the norm.
    """
    arguments = (query_weight, key_weight), _tables(cos_btf, sin_btf), queries_per_group, head_size, eps
    if _has_kernels(qkv_btm):
        from keepstep.models.kernels import qk_norm

        return qk_norm.split_norm_rope(qkv_btm.contiguous(), *arguments)
    return _by_torch(qkv_btm, *arguments)


@split_norm_rope.register_fake
def _(qkv_btm: Tensor, _query: Tensor, _key: Tensor, _cos: Any, _sin: Any, queries: int, size: int, _eps: float) -> Any:
    b, t, m = qkv_btm.shape
    groups = m // ((queries + 2) * size)
    return tuple(qkv_btm.new_empty(b, t, count, size) for count in (groups * queries, groups, groups))


@torch.library.custom_op("keepstep::split_norm_rope_backward", mutates_args=())
def split_norm_rope_backward(
    gradient_btm: Tensor,
    qkv_btm: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos_btf: Tensor | None,
    sin_btf: Tensor | None,
    queries_per_group: int,
    head_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projection and of both weights, from that of the heads in the projection's own order."""
    arguments = (query_weight, key_weight), _tables(cos_btf, sin_btf), queries_per_group, head_size, eps
    if _has_kernels(qkv_btm):
        from keepstep.models.kernels import qk_norm

        return qk_norm.split_norm_rope_backward(gradient_btm.contiguous(), qkv_btm.contiguous(), *arguments)
    return _backward_by_torch(gradient_btm, qkv_btm, *arguments)


@split_norm_rope_backward.register_fake
def _(_gradient: Tensor, qkv_btm: Tensor, query_weight: Tensor, key_weight: Tensor, *_others: Any) -> Parts:
    return torch.empty_like(qkv_btm), torch.empty_like(query_weight), torch.empty_like(key_weight)


def _by_torch(qkv_btm: Tensor, weights: Pair, tables: Pair | None, queries: int, head_size: int, eps: float) -> Parts:
    grouped = qkv_btm.unflatten(-1, (-1, queries + 2, head_size))
    parts = []
    for heads, weight in zip((grouped[..., :-2, :], grouped[..., -2, :]), weights, strict=True):
        vectors = heads if len(weight) == head_size else heads.flatten(2)
        normed = F.rms_norm(vectors, weight.shape, weight, eps).view(heads.shape)
        parts.append(normed if tables is None else apply_rope(normed, *tables))
    return parts[0].flatten(2, 3), parts[1], grouped[..., -1, :].contiguous()


def _backward_by_torch(
    gradient_btm: Tensor, qkv_btm: Tensor, weights: Pair, tables: Pair | None, queries: int, head_size: int, eps: float
) -> Parts:
    gradient, grouped = (tensor.unflatten(-1, (-1, queries + 2, head_size)) for tensor in (gradient_btm, qkv_btm))
    d_qkv, d_weights = gradient.float().clone(), []
    for place, weight in zip((slice(0, -2), slice(-2, -1)), weights, strict=True):
        dy, x = gradient[..., place, :].float(), grouped[..., place, :].float()
        if tables is not None:
            dy = apply_rope(dy, tables[0], -tables[1])
        shape = x.shape
        if len(weight) != head_size:
            dy, x = dy.flatten(2), x.flatten(2)
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        unit, by_weight = x * inverse, dy * weight.float()
        d_weights.append((dy * unit).flatten(0, -2).sum(0).to(weight.dtype))
        dx = inverse * (by_weight - unit * (by_weight * unit).mean(-1, keepdim=True))
        d_qkv[..., place, :] = dx.view(shape)
    return d_qkv.flatten(2).to(qkv_btm.dtype), d_weights[0], d_weights[1]


def _tables(cos_btf: Tensor | None, sin_btf: Tensor | None) -> Pair | None:
    return None if cos_btf is None or sin_btf is None else (cos_btf.contiguous(), sin_btf.contiguous())


def _has_kernels(tensor: Tensor) -> bool:
    return proven("qk_norm", tensor, _prove)


def _prove(device: torch.device) -> float:
    """Against torch's operators on the CPU: norms of heads and of rows, with and without rope."""
    from keepstep.models.kernels import qk_norm

    random = torch.Generator().manual_seed(1)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for size, queries, groups, per_head in ((64, 4, 3, True), (128, 1, 5, False)):
        angle = torch.rand(1, 40, size // 2, generator=random) * 40
        qkv, gradient = (torch.randn(2, 40, groups * (queries + 2) * size, generator=random).bfloat16() for _ in "xd")
        widths = (size, size) if per_head else (groups * queries * size, groups * size)
        query, key = ((1 + torch.randn(width, generator=random) / 4).bfloat16() for width in widths)
        tables = (angle.cos(), angle.sin()) if per_head else None
        there = tables and (tables[0].to(device), tables[1].to(device))
        weights = query.to(device), key.to(device)
        ours += qk_norm.split_norm_rope(qkv.to(device), weights, there, queries, size, 1e-5)
        moved = gradient.to(device), qkv.to(device)
        ours += qk_norm.split_norm_rope_backward(*moved, weights, there, queries, size, 1e-5)
        theirs += _by_torch(qkv, (query, key), tables, queries, size, 1e-5)
        theirs += _backward_by_torch(gradient, qkv, (query, key), tables, queries, size, 1e-5)
    return relative_difference([tensor.cpu() for tensor in ours], theirs)
