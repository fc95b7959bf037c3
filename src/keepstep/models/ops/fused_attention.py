"""Causal attention from the fused projection on, as one operator with our own backward kernels.

The forward pass is cuDNN's. cuDNN's backward pass makes four passes over memory besides its matmuls: the softmax
statistics, query gradients to bf16, the sum over heads that share keys, and rope. Our kernels
(`kernels/attention_backward.cu`) keep the gradients of keys and values in registers over all heads that share them and
apply rope in the epilogue. They sum the gradients of queries as integers, so every run gets the same bits.

Shape legend: b rows, t tokens, d hidden, m rows of the fused projection, g key-value heads, n query heads, e head size,
f rotary frequencies (half a head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.attention_backward import HEAD_SIZES, SavedAttention, attention_backward_kernels
from keepstep.models.kernels.cuda import CudaError, is_hopper, relative_difference, works
from keepstep.models.ops.rope import merge_rope_backward, qkv_rope_forward, split_apply_rope

RopeTables = tuple[Tensor, Tensor]


def has_kernel(device: torch.device, head_size: int) -> bool:
    """Whether the kernels run on a device for heads of this size."""
    if device.type != "cuda" or head_size not in HEAD_SIZES or not is_hopper(device):
        return False
    return works(f"attention_{head_size}", device, _PROOFS[head_size])


def fused_attention(qkv_btm: Tensor, rotary: RopeTables | None, queries_per_group: int, head_size: int) -> Tensor:
    """The output [b, t, n·e] of attention over a fused projection."""
    tables = rotary or (None, None)
    attn_out: Tensor = _Attention.apply(qkv_btm, *tables, queries_per_group, head_size)  # type: ignore[no-untyped-call]
    return attn_out


def heads_attention(query_btne: Tensor, key_btge: Tensor, value_btge: Tensor) -> Tensor:
    """The same over heads that something else has split and changed: norms, rope on a part of each head."""
    attn_out: Tensor = _HeadsAttention.apply(query_btne, key_btge, value_btge)  # type: ignore[no-untyped-call]
    return attn_out


def qkv_fused_attention(
    x_btd: Tensor, weight_md: Tensor, rotary: RopeTables, queries_per_group: int, head_size: int
) -> Tensor:
    """The same, with the projection."""
    attn_out: Tensor = _ProjectedAttention.apply(  # type: ignore[no-untyped-call]
        x_btd, weight_md, *rotary, queries_per_group, head_size
    )
    return attn_out


class _Attention(torch.autograd.Function):
    """Split into heads, rope and attention as one autograd step."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, queries_per_group: int, head_size: int
    ) -> Tensor:
        if cos is not None and sin is not None:
            parts = split_apply_rope(qkv, cos, sin, queries_per_group, head_size)
        else:
            grouped = qkv.unflatten(-1, (-1, queries_per_group + 2, head_size))
            parts = (grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :])
            parts = tuple(part.contiguous() for part in parts)
        attn_out_btne, lse = attention_forward(*parts)
        attn_out_btd: Tensor = attn_out_btne.flatten(2)
        ctx.save_for_backward(*parts, attn_out_btne, lse, cos, sin)
        return attn_out_btd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return attention_qkv_backward(gradients[0], *ctx.saved_tensors), None, None, None, None


class _HeadsAttention(torch.autograd.Function):
    """Attention alone."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = tuple(part.contiguous() for part in (query, key, value))
        attn_out_btne, lse = attention_forward(*parts)
        attn_out_btd: Tensor = attn_out_btne.flatten(2)
        ctx.save_for_backward(*parts, attn_out_btne, lse)
        return attn_out_btd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, key_btge, *_ = saved = ctx.saved_tensors
        d_qkv_btm = attention_qkv_backward(gradients[0], *saved, None, None)
        grouped = d_qkv_btm.unflatten(-1, (key_btge.shape[2], -1, key_btge.shape[3]))
        return grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]


class _ProjectedAttention(torch.autograd.Function):
    """The same with the projection."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int, head_size: int
    ) -> Tensor:
        parts = qkv_rope_forward(x, weight, cos, sin, queries_per_group, head_size)
        attn_out_btne, lse = attention_forward(*parts)
        attn_out_btd: Tensor = attn_out_btne.flatten(2)
        saved_x = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_x, weight, *parts, attn_out_btne, lse, cos, sin)
        return attn_out_btd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_btd, weight_md, *saved = ctx.saved_tensors
        d_qkv = attention_qkv_backward(gradients[0], *saved).flatten(0, 1)
        by_x, by_weight = ctx.needs_input_grad[:2]
        return (
            torch.mm(d_qkv, weight_md).unflatten(0, gradients[0].shape[:2]) if by_x else None,
            torch.mm(d_qkv.t(), x_btd.flatten(0, 1)) if by_weight else None,
            *(None,) * 4,
        )


@torch.library.custom_op("keepstep::attention_forward", mutates_args=())
def attention_forward(query_btne: Tensor, key_btge: Tensor, value_btge: Tensor) -> tuple[Tensor, Tensor]:
    """The output [b, t, n, e] of attention, and the fp32 log-sum-exp of each softmax [b, n, t]."""
    sides = [part.transpose(1, 2) for part in (query_btne, key_btge, value_btge)]
    if query_btne.is_cuda:
        attn_out_bnte, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *sides, None, compute_log_sumexp=True, is_causal=True
        )
        return attn_out_bnte.transpose(1, 2).contiguous(), lse.view(lse.shape[:3]).contiguous()
    scores_bnts = _scores(query_btne, key_btge)
    value_bnse = _per_query_head(value_btge, query_btne.shape[2])
    attn_out_bnte = scores_bnts.softmax(-1) @ value_bnse
    return attn_out_bnte.transpose(1, 2).to(query_btne.dtype).contiguous(), scores_bnts.logsumexp(-1)


@attention_forward.register_fake
def _(query_btne: Tensor, _key: Tensor, _value: Tensor) -> tuple[Tensor, Tensor]:
    b, t, n, _ = query_btne.shape
    return torch.empty_like(query_btne), query_btne.new_empty((b, n, t), dtype=torch.float32)


@torch.library.custom_op("keepstep::attention_qkv_backward", mutates_args=())
def attention_qkv_backward(
    gradient_btd: Tensor,
    query_btne: Tensor,
    key_btge: Tensor,
    value_btge: Tensor,
    attn_out_btne: Tensor,
    lse_bnt: Tensor,
    cos_btf: Tensor | None,
    sin_btf: Tensor | None,
) -> Tensor:
    """The gradient [b, t, m] of the fused projection."""
    gradient_btne = gradient_btd.contiguous().view(query_btne.shape)
    tables = None if cos_btf is None or sin_btf is None else (cos_btf.contiguous(), sin_btf.contiguous())
    saved = SavedAttention(query_btne, key_btge, value_btge, attn_out_btne, lse_bnt)
    if query_btne.is_cuda:
        return attention_backward_kernels(gradient_btne, saved, tables)
    return _backward_by_torch(gradient_btne, saved, tables)


@attention_qkv_backward.register_fake
def _(
    gradient_btd: Tensor, query: Tensor, key: Tensor, _value: Tensor, _out: Tensor, _lse: Tensor, _cos: Any, _sin: Any
) -> Tensor:
    b, t, n, e = query.shape
    return gradient_btd.new_empty((b, t, (n + 2 * key.shape[2]) * e))


def _scores(query_btne: Tensor, key_btge: Tensor) -> Tensor:
    """Scaled scores [b, n, t, s] in fp32, minus infinity for later tokens."""
    query_bnte, key_bnse = query_btne.transpose(1, 2).float(), _per_query_head(key_btge, query_btne.shape[2])
    scores_bnts = query_bnte @ key_bnse.transpose(2, 3) / query_btne.shape[3] ** 0.5
    tokens = query_btne.shape[1]
    later_ts = torch.ones(tokens, tokens, dtype=torch.bool, device=scores_bnts.device).triu(1)
    visible_bnts: Tensor = scores_bnts.masked_fill(later_ts, float("-inf"))
    return visible_bnts


def _per_query_head(side_btge: Tensor, heads: int) -> Tensor:
    """Keys or values of every query head [b, n, t, e], in fp32."""
    return side_btge.transpose(1, 2).float().repeat_interleave(heads // side_btge.shape[2], dim=1)


def _backward_by_torch(gradient_btne: Tensor, saved: SavedAttention, tables: RopeTables | None) -> Tensor:
    """What the kernels compute, in torch's own operators."""
    heads, groups, size = gradient_btne.shape[2], *saved.key_btge.shape[2:]
    weights_bnts = torch.exp(_scores(saved.query_btne, saved.key_btge) - saved.lse_bnt[..., None])
    gradient_bnte = gradient_btne.transpose(1, 2).float()
    key_bnse, value_bnse = (_per_query_head(side, heads) for side in (saved.key_btge, saved.value_btge))
    delta_bnt = (gradient_bnte * saved.attn_out_btne.transpose(1, 2)).sum(-1)
    d_scores_bnts = weights_bnts * (gradient_bnte @ value_bnse.transpose(2, 3) - delta_bnt[..., None]) * size**-0.5
    d_query_bnte = d_scores_bnts @ key_bnse
    d_key_bnse = d_scores_bnts.transpose(2, 3) @ saved.query_btne.transpose(1, 2).float()
    d_value_bnse = weights_bnts.transpose(2, 3) @ gradient_bnte
    d_key, d_value = (part.unflatten(1, (groups, -1)).sum(2) for part in (d_key_bnse, d_value_bnse))
    parts = [part.transpose(1, 2) for part in (d_query_bnte, d_key, d_value)]
    if tables is not None:
        d_qkv_btm: Tensor = merge_rope_backward(*parts, *tables)
        return d_qkv_btm.to(gradient_btne.dtype)
    d_query_btgre = parts[0].unflatten(2, (groups, -1))
    merged = torch.cat([d_query_btgre, parts[1].unsqueeze(3), parts[2].unsqueeze(3)], dim=3)
    return merged.flatten(2).to(gradient_btne.dtype)


def _proof(device: torch.device, head_size: int) -> float:
    """With more work than the GPU has room for at a time."""
    random = torch.Generator(device).manual_seed(1)
    rows, tokens, groups, queries = 2, 2048, 4, 4
    width = groups * (queries + 2) * head_size
    qkv, gradient = (
        torch.randn(rows, tokens, size, device=device, generator=random).bfloat16()
        for size in (width, groups * queries * head_size)
    )
    angle = torch.rand(1, tokens, head_size // 2, device=device, generator=random) * tokens
    tables = angle.cos(), angle.sin()
    outcomes = []
    with torch.enable_grad():
        for run in (fused_attention, _by_torch):
            inputs = qkv.clone().requires_grad_()
            try:
                attn_out = run(inputs, tables, queries, head_size)
            except RuntimeError as error:
                raise CudaError(f"cuDNN gives no forward pass: {error}") from error
            outcomes.append([attn_out, *torch.autograd.grad(attn_out, inputs, gradient)])
    return relative_difference(*outcomes)


_PROOFS = {64: lambda device: _proof(device, 64), 128: lambda device: _proof(device, 128)}


def _by_torch(qkv: Tensor, tables: RopeTables, queries: int, head_size: int) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in split_apply_rope(qkv, *tables, queries, head_size))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
