"""Causal attention from the fused projection on, as one operator that is differentiated by kernels of our own.

Forward is cuDNN's. Its backward pass makes four passes over memory beside the products: what the softmax takes off,
queries' gradients to bf16, the sum over heads that share keys, and turning back. Ours (`kernels/attention_backward.cu`)
keeps keys' and values' gradients in registers over all heads that share them, and turns them on the way out.

Shape legend: b rows, t tokens, d hidden, m rows of the fused projection, g key-value heads, n query heads, e head size,
f rotary frequencies (half a head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.attention_backward import HEAD_SIZE, Attended, fused_gradient, takes
from keepstep.models.kernels.cuda import CudaError, is_hopper
from keepstep.models.kernels.proof import relative_difference, works
from keepstep.models.turn import join_and_turn_back, projected_and_turned, split_and_turn

__all__ = ["attend_fused", "has_kernel", "project_and_attend", "takes"]


def has_kernel(device: torch.device) -> bool:
    """Whether the kernels run on a device; they add up queries' gradients in an order of their own."""
    repeatable = torch.are_deterministic_algorithms_enabled()
    return device.type == "cuda" and not repeatable and is_hopper(device) and works("attention", device, _proof)


def attend_fused(
    qkv_btm: Tensor, rotary: tuple[Tensor, Tensor] | None, queries_per_group: int, head_size: int
) -> Tensor:
    """Mixed values [b, t, n·e] of a fused projection."""
    tables = rotary or (None, None)
    mixed: Tensor = _Attention.apply(qkv_btm, *tables, queries_per_group, head_size)  # type: ignore[no-untyped-call]
    return mixed


def project_and_attend(
    x_btd: Tensor, weight_md: Tensor, rotary: tuple[Tensor, Tensor], queries_per_group: int, head_size: int
) -> Tensor:
    """The same for a projection that is still to be computed."""
    mixed: Tensor = _ProjectedAttention.apply(  # type: ignore[no-untyped-call]
        x_btd, weight_md, *rotary, queries_per_group, head_size
    )
    return mixed


class _Attention(torch.autograd.Function):
    """Taking apart, turning and attending as one step of differentiation."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, queries_per_group: int, head_size: int
    ) -> Tensor:
        if cos is not None and sin is not None:
            parts = split_and_turn(qkv, cos, sin, queries_per_group, head_size)
        else:
            grouped = qkv.unflatten(-1, (-1, queries_per_group + 2, head_size))
            parts = (grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :])
            parts = tuple(part.contiguous() for part in parts)
        mixed_btne, normalisers = attended(*parts)
        mixed_btd: Tensor = mixed_btne.flatten(2)
        ctx.save_for_backward(*parts, mixed_btne, normalisers, cos, sin)
        return mixed_btd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return attended_backward(gradients[0], *ctx.saved_tensors), None, None, None, None


class _ProjectedAttention(torch.autograd.Function):
    """The same with the projection."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int, head_size: int
    ) -> Tensor:
        parts = projected_and_turned(x, weight, cos, sin, queries_per_group, head_size)
        mixed_btne, normalisers = attended(*parts)
        mixed_btd: Tensor = mixed_btne.flatten(2)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, *parts, mixed_btne, normalisers, cos, sin)
        return mixed_btd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_btd, weight_md, *kept = ctx.saved_tensors
        d_qkv = attended_backward(gradients[0], *kept).flatten(0, 1)
        by_x, by_weight = ctx.needs_input_grad[:2]
        return (
            torch.mm(d_qkv, weight_md).unflatten(0, gradients[0].shape[:2]) if by_x else None,
            torch.mm(d_qkv.t(), x_btd.flatten(0, 1)) if by_weight else None,
            *(None,) * 4,
        )


@torch.library.custom_op("keepstep::attended", mutates_args=())
def attended(query_btne: Tensor, key_btge: Tensor, value_btge: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed values [b, t, n, e], and the fp32 logarithm of each softmax's sum [b, n, t]."""
    sides = [part.transpose(1, 2) for part in (query_btne, key_btge, value_btge)]
    if query_btne.is_cuda:
        mixed_bnte, normalisers, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *sides, None, compute_log_sumexp=True, is_causal=True
        )
        return mixed_bnte.transpose(1, 2).contiguous(), normalisers.view(normalisers.shape[:3]).contiguous()
    scores_bnts = _scores(query_btne, key_btge)
    value_bnse = _each_query_head(value_btge, query_btne.shape[2])
    mixed_bnte = scores_bnts.softmax(-1) @ value_bnse
    return mixed_bnte.transpose(1, 2).to(query_btne.dtype).contiguous(), scores_bnts.logsumexp(-1)


@attended.register_fake
def _(query_btne: Tensor, _key: Tensor, _value: Tensor) -> tuple[Tensor, Tensor]:
    b, t, n, _ = query_btne.shape
    return torch.empty_like(query_btne), query_btne.new_empty((b, n, t), dtype=torch.float32)


@torch.library.custom_op("keepstep::attended_backward", mutates_args=())
def attended_backward(
    gradient_btd: Tensor,
    query_btne: Tensor,
    key_btge: Tensor,
    value_btge: Tensor,
    mixed_btne: Tensor,
    normalisers_bnt: Tensor,
    cos_btf: Tensor | None,
    sin_btf: Tensor | None,
) -> Tensor:
    """The gradient [b, t, m] of the fused projection."""
    gradient_btne = gradient_btd.contiguous().view(query_btne.shape)
    tables = None if cos_btf is None or sin_btf is None else (cos_btf.contiguous(), sin_btf.contiguous())
    kept = Attended(query_btne, key_btge, value_btge, mixed_btne, normalisers_bnt)
    if query_btne.is_cuda:
        return fused_gradient(gradient_btne, kept, tables)
    return _fused_gradient(gradient_btne, kept, tables)


@attended_backward.register_fake
def _(
    gradient_btd: Tensor,
    query: Tensor,
    key: Tensor,
    _value: Tensor,
    _mixed: Tensor,
    _sums: Tensor,
    _cos: Any,
    _sin: Any,
) -> Tensor:
    b, t, n, e = query.shape
    return gradient_btd.new_empty((b, t, (n + 2 * key.shape[2]) * e))


def _scores(query_btne: Tensor, key_btge: Tensor) -> Tensor:
    """Scaled scores [b, n, t, s] in fp32, minus infinity for tokens to come."""
    query_bnte, key_bnse = query_btne.transpose(1, 2).float(), _each_query_head(key_btge, query_btne.shape[2])
    scores_bnts = query_bnte @ key_bnse.transpose(2, 3) / query_btne.shape[3] ** 0.5
    tokens = query_btne.shape[1]
    later_ts = torch.ones(tokens, tokens, dtype=torch.bool, device=scores_bnts.device).triu(1)
    visible_bnts: Tensor = scores_bnts.masked_fill(later_ts, float("-inf"))
    return visible_bnts


def _each_query_head(side_btge: Tensor, heads: int) -> Tensor:
    """Keys or values of every query head [b, n, t, e], in fp32."""
    return side_btge.transpose(1, 2).float().repeat_interleave(heads // side_btge.shape[2], dim=1)


def _fused_gradient(gradient_btne: Tensor, kept: Attended, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """What the kernels compute, in torch's own operators."""
    heads, groups, size = gradient_btne.shape[2], *kept.key_btge.shape[2:]
    weights_bnts = torch.exp(_scores(kept.query_btne, kept.key_btge) - kept.normalisers_bnt[..., None])
    gradient_bnte = gradient_btne.transpose(1, 2).float()
    key_bnse, value_bnse = (_each_query_head(side, heads) for side in (kept.key_btge, kept.value_btge))
    common_bnt = (gradient_bnte * kept.mixed_btne.transpose(1, 2)).sum(-1)
    slopes_bnts = weights_bnts * (gradient_bnte @ value_bnse.transpose(2, 3) - common_bnt[..., None]) * size**-0.5
    by_query_bnte = slopes_bnts @ key_bnse
    by_key_bnse = slopes_bnts.transpose(2, 3) @ kept.query_btne.transpose(1, 2).float()
    by_value_bnse = weights_bnts.transpose(2, 3) @ gradient_bnte
    by_key, by_value = (part.unflatten(1, (groups, -1)).sum(2) for part in (by_key_bnse, by_value_bnse))
    parts = [part.transpose(1, 2) for part in (by_query_bnte, by_key, by_value)]
    if tables is not None:
        turned_btm: Tensor = join_and_turn_back(*parts, *tables)
        return turned_btm.to(gradient_btne.dtype)
    by_query_btgre = parts[0].unflatten(2, (groups, -1))
    together = torch.cat([by_query_btgre, parts[1].unsqueeze(3), parts[2].unsqueeze(3)], dim=3)
    return together.flatten(2).to(gradient_btne.dtype)


def _proof(device: torch.device) -> float:
    """With more work than the GPU has room for at once."""
    random = torch.Generator(device).manual_seed(1)
    rows, tokens, groups, queries = 2, 2048, 4, 4
    width = groups * (queries + 2) * HEAD_SIZE
    qkv, gradient = (
        torch.randn(rows, tokens, size, device=device, generator=random).bfloat16()
        for size in (width, groups * queries * HEAD_SIZE)
    )
    angle = torch.rand(1, tokens, HEAD_SIZE // 2, device=device, generator=random) * tokens
    tables = angle.cos(), angle.sin()
    outcomes = []
    with torch.enable_grad():
        for way in (attend_fused, _by_torch):
            inputs = qkv.clone().requires_grad_()
            try:
                mixed = way(inputs, tables, queries, HEAD_SIZE)
            except RuntimeError as error:
                raise CudaError(f"cuDNN gives no forward pass: {error}") from error
            outcomes.append([mixed, *torch.autograd.grad(mixed, inputs, gradient)])
    return relative_difference(*outcomes)


def _by_torch(qkv: Tensor, tables: tuple[Tensor, Tensor], queries: int, head_size: int) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in split_and_turn(qkv, *tables, queries, head_size))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
