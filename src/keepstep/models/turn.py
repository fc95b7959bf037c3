"""Taking the fused projection apart and turning queries and keys by their positions, as one operator.

Shape legend: b rows, t tokens, m rows of the fused projection, g key-value heads, r query heads a key-value head,
n = g·r query heads, e head size, f rotary frequencies (half a head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
