"""Causal attention from the fused projection on, as one operator with our own backward kernels.

The forward pass is cuDNN's, and inside packed documents and sliding windows the flash kernel's. cuDNN's backward pass
makes four passes over memory besides its matmuls: the softmax statistics, query gradients to bf16, the sum over heads
that share keys, and rope. Our kernels (`kernels/attention_backward.cu`) keep the gradients of keys and values in
registers over all heads that share them and apply rope in the epilogue. They sum the gradients of queries as integers,
so every run gets the same bits.

Shape legend: b rows, t tokens, d hidden, m rows of the fused projection, g key-value heads, n query heads, e head size,
f rotary frequencies (half a head).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.attention_backward import (
    HEAD_SIZES,
    SavedAttention,
    attention_backward_kernels,
    is_padded,
)
from keepstep.models.kernels.attention_schedule import BlockMask, make_block_mask
from keepstep.models.kernels.cuda import CudaError, is_hopper, relative_difference, works
from keepstep.models.ops.qk_norm import split_norm_rope, split_norm_rope_backward
from keepstep.models.ops.rope import merge_rope_backward, qkv_rope_forward, split_apply_rope
from keepstep.models.ops.varlen_attention import VarlenSpans, flash_varlen

RopeTables = tuple[Tensor, Tensor]


class ScoreRule(NamedTuple):
    """Which keys a query sees and what scores are multiplied by; by default all keys before it, by 1 / √e."""

    scale: float | None = None
    window: int = 0
    max_seqlen: int = 0
    cu_seqlens: Tensor | None = None
    """Where documents start in rows laid end to end. With it come the numbers above and the block mask below."""
    first_key_bt: Tensor | None = None
    query_ends_bk: Tensor | None = None
    lists_pi: Tensor | None = None


CAUSAL = ScoreRule()
_RULE_GRADIENTS = (None,) * len(CAUSAL)


def has_kernel(device: torch.device, head_size: int, masked: bool = False) -> bool:
    """Whether the kernels run on a device for heads of this size; `masked` in packed documents and sliding windows.

    Padded heads use them in place of the flash kernel's deterministic form, which is slower by more than the padding.
    """
    if is_padded(head_size) and not torch.are_deterministic_algorithms_enabled():
        return False
    if device.type != "cuda" or not (head_size in HEAD_SIZES or is_padded(head_size)) or not is_hopper(device):
        return False
    proof = _proof_of(head_size, masked)
    return works(f"attention_{head_size}{'_masked' if masked else ''}", device, proof)


def fused_attention(
    qkv_btm: Tensor, rotary: RopeTables | None, queries_per_group: int, head_size: int, rule: ScoreRule = CAUSAL
) -> Tensor:
    """The output [b, t, n·e] of attention over a fused projection."""
    tables = rotary or (None, None)
    attn_out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        qkv_btm, *tables, queries_per_group, head_size, *rule
    )
    return attn_out


def heads_attention(query_btne: Tensor, key_btge: Tensor, value_btge: Tensor, rule: ScoreRule = CAUSAL) -> Tensor:
    """The same over heads that something else has split and changed: norms, rope on a part of each head."""
    attn_out: Tensor = _HeadsAttention.apply(query_btne, key_btge, value_btge, *rule)  # type: ignore[no-untyped-call]
    return attn_out


def normed_attention(
    qkv_btm: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    rotary: RopeTables | None,
    queries_per_group: int,
    head_size: int,
    rule: ScoreRule = CAUSAL,
) -> Tensor:
    """The same over a fused projection whose queries and keys are normalised first, with these weights."""
    tables = rotary or (None, None)
    attn_out: Tensor = _NormedAttention.apply(  # type: ignore[no-untyped-call]
        qkv_btm, *weights, *tables, queries_per_group, head_size, eps, *rule
    )
    return attn_out


def qkv_fused_attention(
    x_btd: Tensor,
    weight_md: Tensor,
    rotary: RopeTables,
    queries_per_group: int,
    head_size: int,
    rule: ScoreRule = CAUSAL,
) -> Tensor:
    """The same, with the projection."""
    attn_out: Tensor = _ProjectedAttention.apply(  # type: ignore[no-untyped-call]
        x_btd, weight_md, *rotary, queries_per_group, head_size, *rule
    )
    return attn_out


def _attend(
    ctx: Any, parts: tuple[Tensor, ...], tables: tuple[Tensor | None, ...], rule: ScoreRule, *others: Tensor | None
) -> Tensor:
    """The output [b, t, n·e]; saves what `attention_qkv_backward` needs, after `others`."""
    numbers = (rule.max_seqlen, rule.window, rule.scale)
    attn_out_btne, lse = attention_forward(*parts, rule.cu_seqlens, rule.first_key_bt, *numbers)
    mask = (rule.first_key_bt, rule.query_ends_bk, rule.lists_pi)
    ctx.save_for_backward(*others, *parts, attn_out_btne, lse, *tables, *mask)
    ctx.scale = rule.scale
    attn_out_btd: Tensor = attn_out_btne.flatten(2)
    return attn_out_btd


class _Attention(torch.autograd.Function):
    """Split into heads, rope and attention as one autograd step."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, queries_per_group: int, size: int, *rule: Any
    ) -> Tensor:
        if cos is not None and sin is not None:
            parts = split_apply_rope(qkv, cos, sin, queries_per_group, size)
        else:
            grouped = qkv.unflatten(-1, (-1, queries_per_group + 2, size))
            parts = (grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :])
            parts = tuple(part.contiguous() for part in parts)
        return _attend(ctx, parts, (cos, sin), ScoreRule(*rule))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_qkv = attention_qkv_backward(gradients[0], *ctx.saved_tensors, ctx.scale)
        return d_qkv, *(None,) * 4, *_RULE_GRADIENTS


class _HeadsAttention(torch.autograd.Function):
    """Attention alone."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rule: Any) -> Tensor:
        parts = tuple(part.contiguous() for part in (query, key, value))
        return _attend(ctx, parts, (None, None), ScoreRule(*rule))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, key_btge, *_ = saved = ctx.saved_tensors
        d_qkv_btm = attention_qkv_backward(gradients[0], *saved, ctx.scale)
        grouped = d_qkv_btm.unflatten(-1, (key_btge.shape[2], -1, key_btge.shape[3]))
        return grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :], *_RULE_GRADIENTS


class _NormedAttention(torch.autograd.Function):
    """Split into heads, norms, rope and attention."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, *arguments: Any) -> Tensor:
        query_weight, key_weight, cos, sin, *ctx.sizes = arguments[:7]
        parts = split_norm_rope(qkv, query_weight, key_weight, cos, sin, *ctx.sizes)
        saved = qkv, query_weight, key_weight, cos, sin
        return _attend(ctx, parts, (None, None), ScoreRule(*arguments[7:]), *saved)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        qkv_btm, query_weight, key_weight, cos, sin, *saved = ctx.saved_tensors
        d_heads_btm = attention_qkv_backward(gradients[0], *saved, ctx.scale)
        before = qkv_btm, query_weight, key_weight, cos, sin
        return *split_norm_rope_backward(d_heads_btm, *before, *ctx.sizes), *(None,) * 5, *_RULE_GRADIENTS


class _ProjectedAttention(torch.autograd.Function):
    """The same with the projection."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int, size: int, *rule: Any
    ) -> Tensor:
        parts = qkv_rope_forward(x, weight, cos, sin, queries_per_group, size)
        saved_x = x if ctx.needs_input_grad[1] else None
        return _attend(ctx, parts, (cos, sin), ScoreRule(*rule), saved_x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_btd, weight_md, *saved = ctx.saved_tensors
        d_qkv = attention_qkv_backward(gradients[0], *saved, ctx.scale).flatten(0, 1)
        by_x, by_weight = ctx.needs_input_grad[:2]
        return (
            torch.mm(d_qkv, weight_md).unflatten(0, gradients[0].shape[:2]) if by_x else None,
            torch.mm(d_qkv.t(), x_btd.flatten(0, 1)) if by_weight else None,
            *(None,) * 4,
            *_RULE_GRADIENTS,
        )


@torch.library.custom_op("keepstep::attention_forward", mutates_args=())
def attention_forward(
    query_btne: Tensor,
    key_btge: Tensor,
    value_btge: Tensor,
    cu_seqlens: Tensor | None = None,
    first_key_bt: Tensor | None = None,
    max_seqlen: int = 0,
    window: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [b, t, n, e] of attention, and the fp32 log-sum-exp of each softmax [b, n, t]."""
    if query_btne.is_cuda and cu_seqlens is not None:
        query, key, value = (part.flatten(0, 1) for part in (query_btne, key_btge, value_btge))
        attn_out, lse_nt = flash_varlen(query, key, value, VarlenSpans(cu_seqlens, max_seqlen), window, scale)
        lse_nbt = lse_nt.unflatten(1, query_btne.shape[:2])
        return attn_out.view_as(query_btne), lse_nbt.transpose(0, 1).contiguous()
    sides = [part.transpose(1, 2) for part in (query_btne, key_btge, value_btge)]
    if query_btne.is_cuda:
        attn_out_bnte, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *sides, None, compute_log_sumexp=True, is_causal=True, scale=scale
        )
        return attn_out_bnte.transpose(1, 2).contiguous(), lse.view(lse.shape[:3]).contiguous()
    scores_bnts = _scores(query_btne, key_btge, first_key_bt, scale)
    value_bnse = _per_query_head(value_btge, query_btne.shape[2])
    attn_out_bnte = scores_bnts.softmax(-1) @ value_bnse
    return attn_out_bnte.transpose(1, 2).to(query_btne.dtype).contiguous(), scores_bnts.logsumexp(-1)


@attention_forward.register_fake
def _(query_btne: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
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
    first_key_bt: Tensor | None,
    query_ends_bk: Tensor | None,
    lists_pi: Tensor | None,
    scale: float | None,
) -> Tensor:
    """The gradient [b, t, m] of the fused projection."""
    gradient_btne = gradient_btd.contiguous().view(query_btne.shape)
    tables = None if cos_btf is None or sin_btf is None else (cos_btf.contiguous(), sin_btf.contiguous())
    saved = SavedAttention(query_btne, key_btge, value_btge, attn_out_btne, lse_bnt, scale)
    mask = None
    if first_key_bt is not None and query_ends_bk is not None and lists_pi is not None:
        mask = BlockMask(first_key_bt, query_ends_bk, lists_pi)
    if query_btne.is_cuda:
        return attention_backward_kernels(gradient_btne, saved, tables, mask)
    return _backward_by_torch(gradient_btne, saved, tables, first_key_bt)


@attention_qkv_backward.register_fake
def _(gradient_btd: Tensor, query: Tensor, key: Tensor, *_others: Any) -> Tensor:
    b, t, n, e = query.shape
    return gradient_btd.new_empty((b, t, (n + 2 * key.shape[2]) * e))


def _scores(query_btne: Tensor, key_btge: Tensor, first_key_bt: Tensor | None, scale: float | None) -> Tensor:
    """Scaled scores [b, n, t, s] in fp32, minus infinity for keys that a query does not see."""
    query_bnte, key_bnse = query_btne.transpose(1, 2).float(), _per_query_head(key_btge, query_btne.shape[2])
    scores_bnts = query_bnte @ key_bnse.transpose(2, 3) * (scale or query_btne.shape[3] ** -0.5)
    visible_bnts: Tensor = scores_bnts.masked_fill(~_visible(query_btne, first_key_bt), float("-inf"))
    return visible_bnts


def _visible(query_btne: Tensor, first_key_bt: Tensor | None) -> Tensor:
    """Whether a query sees a key, [b or 1, 1, t, s]."""
    key_s = torch.arange(query_btne.shape[1], device=query_btne.device)
    visible_ts = key_s <= key_s[:, None]
    if first_key_bt is None:
        return visible_ts[None, None]
    return (visible_ts & (key_s >= first_key_bt[..., None]))[:, None]


def _per_query_head(side_btge: Tensor, heads: int) -> Tensor:
    """Keys or values of every query head [b, n, t, e], in fp32."""
    return side_btge.transpose(1, 2).float().repeat_interleave(heads // side_btge.shape[2], dim=1)


def _backward_by_torch(
    gradient_btne: Tensor, saved: SavedAttention, tables: RopeTables | None, first_key_bt: Tensor | None
) -> Tensor:
    """What the kernels compute, in torch's own operators."""
    heads, groups, size = gradient_btne.shape[2], *saved.key_btge.shape[2:]
    scale = saved.scale or size**-0.5
    scores_bnts = _scores(saved.query_btne, saved.key_btge, first_key_bt, scale)
    weights_bnts = torch.exp(scores_bnts - saved.lse_bnt[..., None])
    gradient_bnte = gradient_btne.transpose(1, 2).float()
    key_bnse, value_bnse = (_per_query_head(side, heads) for side in (saved.key_btge, saved.value_btge))
    delta_bnt = (gradient_bnte * saved.attn_out_btne.transpose(1, 2)).sum(-1)
    d_scores_bnts = weights_bnts * (gradient_bnte @ value_bnse.transpose(2, 3) - delta_bnt[..., None]) * scale
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


def _proof(device: torch.device, head_size: int, masked: bool) -> float:
    """With more work than the GPU has room for at a time."""
    random = torch.Generator(device).manual_seed(1)
    rows, tokens, groups, queries = (8, 512, 8, 2) if masked else (2, 2048, 4, 4)
    width = groups * (queries + 2) * head_size
    qkv, gradient = (
        torch.randn(rows, tokens, size, device=device, generator=random).bfloat16()
        for size in (width, groups * queries * head_size)
    )
    angle = torch.rand(1, tokens, head_size // 2, device=device, generator=random) * tokens
    tables, rule = (angle.cos(), angle.sin()), CAUSAL
    if masked:
        # One row of documents from one token on; the window shortens the others.
        starts = (0, 1, 130, 400, *range(tokens, rows * tokens + 1, tokens))
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        rule = ScoreRule(None, 300, tokens, cu_seqlens, *make_block_mask(cu_seqlens, rows, tokens, 300, groups))
    outcomes = []
    with torch.enable_grad():
        for run in (_by_kernels, _by_torch):
            inputs = qkv.clone().requires_grad_()
            try:
                attn_out = run(inputs, tables, queries, head_size, rule)
            except RuntimeError as error:
                raise CudaError(f"no forward pass: {error}") from error
            outcomes.append([attn_out, *torch.autograd.grad(attn_out, inputs, gradient)])
    return relative_difference(*outcomes)


@functools.cache
def _proof_of(head_size: int, masked: bool) -> Callable[[torch.device], float]:
    return functools.partial(_proof, head_size=head_size, masked=masked)


def _by_kernels(qkv: Tensor, tables: RopeTables, queries: int, head_size: int, rule: ScoreRule) -> Tensor:
    if is_padded(head_size):
        query, key, value = split_apply_rope(qkv, *tables, queries, head_size)
        return heads_attention(query, key, value, rule)
    return fused_attention(qkv, tables, queries, head_size, rule)


def _by_torch(qkv: Tensor, tables: RopeTables, queries: int, head_size: int, rule: ScoreRule) -> Tensor:
    parts = split_apply_rope(qkv, *tables, queries, head_size)
    visible = None if rule.first_key_bt is None else _visible(parts[0], rule.first_key_bt)
    query, key, value = (part.transpose(1, 2) for part in parts)
    return (
        F.scaled_dot_product_attention(query, key, value, visible, is_causal=visible is None, enable_gqa=True)
        .transpose(1, 2)
        .flatten(2)
    )
