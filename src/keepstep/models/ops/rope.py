"""Rotary position embeddings (RoPE): split the fused projection into heads and rotate queries and keys in one pass.

On Hopper GPUs this runs in the projection's epilogue (`kernels/qkv_rope.cu`); its plain result is never written.

Shape legend: b rows, t tokens, d hidden, m rows of the fused projection, g key-value heads, r query heads a key-value
head, n = g·r query heads, e head size, f rotary frequencies (half a head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import difference
from keepstep.models.kernels.gemm_tiles import can_fuse_rope, qkv_rope_gemm
from keepstep.models.ops.backend import proven
from keepstep.models.positions import apply_rope


@torch.library.custom_op("keepstep::split_apply_rope", mutates_args=())
def split_apply_rope(
    qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, n, e] and keys [b, t, g, e] with rope; values [b, t, g, e]."""
    if proven("rope", qkv_btm, _prove):
        from keepstep.models.kernels.block import split_apply_rope as kernel

        return kernel(qkv_btm.contiguous(), cos_btf, sin_btf, queries_per_group, head_size)
    return _split_by_torch(qkv_btm, cos_btf, sin_btf, queries_per_group, head_size)


def _split_by_torch(
    qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = qkv_btm.unflatten(-1, (-1, queries_per_group + 2, head_size))
    query = apply_rope(grouped[..., :-2, :], cos_btf, sin_btf).flatten(2, 3)
    return query, apply_rope(grouped[..., -2, :], cos_btf, sin_btf), grouped[..., -1, :].contiguous()


@split_apply_rope.register_fake
def _(qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int) -> Any:  # noqa: ARG001
    b, t, m = qkv_btm.shape
    groups = m // ((queries_per_group + 2) * head_size)
    heads = (groups * queries_per_group, groups, groups)
    return tuple(qkv_btm.new_empty(b, t, count, head_size) for count in heads)


@torch.library.custom_op("keepstep::merge_rope_backward", mutates_args=())
def merge_rope_backward(
    d_query_btne: Tensor, d_key_btge: Tensor, d_value_btge: Tensor, cos_btf: Tensor, sin_btf: Tensor
) -> Tensor:
    """The gradient of the fused projection."""
    queries_per_group = d_query_btne.shape[2] // d_key_btge.shape[2]
    gradients = d_query_btne, d_key_btge, d_value_btge
    if proven("rope", d_key_btge, _prove):
        from keepstep.models.kernels.block import merge_rope_backward as kernel

        return kernel(gradients, cos_btf, sin_btf, queries_per_group)
    return _merge_by_torch(gradients, cos_btf, sin_btf, queries_per_group)


def _merge_by_torch(
    gradients: tuple[Tensor, Tensor, Tensor], cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int
) -> Tensor:
    d_query_btne, d_key_btge, d_value_btge = gradients
    groups = d_key_btge.shape[2]
    d_query_btgre = apply_rope(d_query_btne.unflatten(2, (groups, queries_per_group)), cos_btf, -sin_btf)
    d_key_btge = apply_rope(d_key_btge, cos_btf, -sin_btf)
    return torch.cat([d_query_btgre, d_key_btge[..., None, :], d_value_btge[..., None, :]], dim=3).flatten(2)


@merge_rope_backward.register_fake
def _(d_query_btne: Tensor, d_key_btge: Tensor, d_value_btge: Tensor, cos_btf: Tensor, sin_btf: Tensor) -> Tensor:  # noqa: ARG001
    b, t, groups, size = d_key_btge.shape
    return d_key_btge.new_empty(b, t, (d_query_btne.shape[2] + 2 * groups) * size)


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the names torch calls it with
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
    return merge_rope_backward(*gradients, *ctx.saved_tensors), None, None, None, None


split_apply_rope.register_autograd(_backward, setup_context=_save)


def qkv_rope(
    x_btd: Tensor, weight_md: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the projection."""
    parts: tuple[Tensor, Tensor, Tensor] = _Projection.apply(  # type: ignore[no-untyped-call]
        x_btd, weight_md, cos_btf, sin_btf, queries_per_group, head_size
    )
    return parts


class _Projection(torch.autograd.Function):
    """Projection and rope as one autograd step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, queries: int, head_size: int) -> Any:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, cos, sin)
        return qkv_rope_forward(x, weight, cos, sin, queries, head_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_btd, weight_md, cos_btf, sin_btf = ctx.saved_tensors
        d_qkv = merge_rope_backward(*gradients, cos_btf, sin_btf).flatten(0, 1)
        by_x, by_weight = ctx.needs_input_grad[:2]
        return (
            torch.mm(d_qkv, weight_md).unflatten(0, gradients[0].shape[:2]) if by_x else None,
            torch.mm(d_qkv.t(), x_btd.flatten(0, 1)) if by_weight else None,
            *(None,) * 4,
        )


@torch.library.custom_op("keepstep::qkv_rope_forward", mutates_args=())
def qkv_rope_forward(
    x_btd: Tensor, weight_md: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with rope, and values, of the projection x · weightᵀ."""
    b, t, _ = x_btd.shape
    x_nd = x_btd.flatten(0, 1)
    if x_btd.is_cuda and can_fuse_rope(x_nd, weight_md.shape[0], head_size):
        tables = cos_btf.contiguous(), sin_btf.contiguous()
        parts = qkv_rope_gemm(x_nd.contiguous(), weight_md.contiguous(), *tables, queries_per_group, head_size)
        query, key, value = (part.view(b, t, -1, head_size) for part in parts)
        return query, key, value
    qkv_btm = torch.mm(x_nd, weight_md.t()).view(b, t, -1)
    query, key, value = split_apply_rope(qkv_btm, cos_btf, sin_btf, queries_per_group, head_size)
    return query, key, value


@qkv_rope_forward.register_fake
def _(x_btd: Tensor, weight_md: Tensor, _cos: Tensor, _sin: Tensor, queries_per_group: int, head_size: int) -> Any:
    groups = weight_md.shape[0] // ((queries_per_group + 2) * head_size)
    heads = (groups * queries_per_group, groups, groups)
    return tuple(x_btd.new_empty(*x_btd.shape[:2], count, head_size) for count in heads)


def _prove(device: torch.device) -> float:
    from keepstep.models.kernels import block

    generator = torch.Generator().manual_seed(1)
    b, t, groups, queries = 2, 5, 3, 2
    # One table for all rows, and one for each.
    cases = [
        (
            torch.randn(b, t, groups * (queries + 2) * size, generator=generator).bfloat16(),
            torch.rand(tables, t, size // 2, generator=generator) * 6,
        )
        for size, tables in ((64, 1), (24, b))
    ]

    def results(form: Any, where: torch.device) -> list[Tensor]:
        split, merge = form
        found: list[Tensor] = []
        for qkv, angle in cases:
            tables = angle.cos().to(where), angle.sin().to(where)
            parts = split(qkv.to(where), *tables, queries, 2 * angle.shape[-1])
            found += [*parts, merge(parts, *tables, queries)]
        return found

    kernels = block.split_apply_rope, block.merge_rope_backward
    return difference(results, kernels, (_split_by_torch, _merge_by_torch), device)
