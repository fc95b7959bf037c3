"""Taking the fused projection apart and turning queries and keys by their positions, as one operator.

On Hopper GPUs all of it happens inside the projection (`kernels/turned.cu`), and its result is never written as it is.

Shape legend: b rows, t tokens, d hidden, m rows of the fused projection, g key-value heads, r query heads a key-value
head, n = g·r query heads, e head size, f rotary frequencies (half a head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepstep.models.kernels.turned import joins, turned
from keepstep.models.positions import rotate
from keepstep.models.triton_found import has_triton


@torch.library.custom_op("keepstep::split_and_turn", mutates_args=())
def split_and_turn(
    qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, n, e] and keys [b, t, g, e], turned; values [b, t, g, e]."""
    if qkv_btm.is_cuda and has_triton():
        from keepstep.models.kernels.rotary import split_and_turn as kernel

        return kernel(qkv_btm.contiguous(), cos_btf, sin_btf, queries_per_group, head_size)
    grouped = qkv_btm.unflatten(-1, (-1, queries_per_group + 2, head_size))
    query = rotate(grouped[..., :-2, :], cos_btf, sin_btf).flatten(2, 3)
    return query, rotate(grouped[..., -2, :], cos_btf, sin_btf), grouped[..., -1, :].contiguous()


@split_and_turn.register_fake
def _(qkv_btm: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int) -> Any:  # noqa: ARG001
    b, t, m = qkv_btm.shape
    groups = m // ((queries_per_group + 2) * head_size)
    heads = (groups * queries_per_group, groups, groups)
    return tuple(qkv_btm.new_empty(b, t, count, head_size) for count in heads)


@torch.library.custom_op("keepstep::join_and_turn_back", mutates_args=())
def join_and_turn_back(
    d_query_btne: Tensor, d_key_btge: Tensor, d_value_btge: Tensor, cos_btf: Tensor, sin_btf: Tensor
) -> Tensor:
    """The gradient of the fused projection."""
    groups = d_key_btge.shape[2]
    queries_per_group = d_query_btne.shape[2] // groups
    if d_key_btge.is_cuda and has_triton():
        from keepstep.models.kernels.rotary import join_and_turn_back as kernel

        return kernel((d_query_btne, d_key_btge, d_value_btge), cos_btf, sin_btf, queries_per_group)
    d_query_btgre = rotate(d_query_btne.unflatten(2, (groups, queries_per_group)), cos_btf, -sin_btf)
    d_key_btge = rotate(d_key_btge, cos_btf, -sin_btf)
    return torch.cat([d_query_btgre, d_key_btge[..., None, :], d_value_btge[..., None, :]], dim=3).flatten(2)


@join_and_turn_back.register_fake
def _(d_query_btne: Tensor, d_key_btge: Tensor, d_value_btge: Tensor, cos_btf: Tensor, sin_btf: Tensor) -> Tensor:  # noqa: ARG001
    b, t, groups, size = d_key_btge.shape
    return d_key_btge.new_empty(b, t, (d_query_btne.shape[2] + 2 * groups) * size)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the names torch calls it with
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
    return join_and_turn_back(*gradients, *ctx.saved_tensors), None, None, None, None


split_and_turn.register_autograd(_backward, setup_context=_keep)


def project_and_turn(
    x_btd: Tensor, weight_md: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a projection that is still to be computed."""
    parts: tuple[Tensor, Tensor, Tensor] = _Projection.apply(  # type: ignore[no-untyped-call]
        x_btd, weight_md, cos_btf, sin_btf, queries_per_group, head_size
    )
    return parts


class _Projection(torch.autograd.Function):
    """Product and turn as one step of differentiation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, queries: int, head_size: int) -> Any:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, cos, sin)
        return projected_and_turned(x, weight, cos, sin, queries, head_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_btd, weight_md, cos_btf, sin_btf = ctx.saved_tensors
        d_qkv = join_and_turn_back(*gradients, cos_btf, sin_btf).flatten(0, 1)
        by_x, by_weight = ctx.needs_input_grad[:2]
        return (
            torch.mm(d_qkv, weight_md).unflatten(0, gradients[0].shape[:2]) if by_x else None,
            torch.mm(d_qkv.t(), x_btd.flatten(0, 1)) if by_weight else None,
            *(None,) * 4,
        )


@torch.library.custom_op("keepstep::projected_and_turned", mutates_args=())
def projected_and_turned(
    x_btd: Tensor, weight_md: Tensor, cos_btf: Tensor, sin_btf: Tensor, queries_per_group: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values, of the projection x · weightᵀ."""
    b, t, _ = x_btd.shape
    x_nd = x_btd.flatten(0, 1)
    if x_btd.is_cuda and joins(x_nd, weight_md.shape[0], head_size):
        tables = cos_btf.contiguous(), sin_btf.contiguous()
        parts = turned(x_nd.contiguous(), weight_md.contiguous(), *tables, queries_per_group)
        query, key, value = (part.view(b, t, -1, head_size) for part in parts)
        return query, key, value
    qkv_btm = torch.mm(x_nd, weight_md.t()).view(b, t, -1)
    query, key, value = split_and_turn(qkv_btm, cos_btf, sin_btf, queries_per_group, head_size)
    return query, key, value


@projected_and_turned.register_fake
def _(x_btd: Tensor, weight_md: Tensor, _cos: Tensor, _sin: Tensor, queries_per_group: int, head_size: int) -> Any:
    groups = weight_md.shape[0] // ((queries_per_group + 2) * head_size)
    heads = (groups * queries_per_group, groups, groups)
    return tuple(x_btd.new_empty(*x_btd.shape[:2], count, head_size) for count in heads)
