"""Causal self-attention with grouped key-value heads.

Shape legend: b rows, t query tokens, s key tokens, d hidden, g key-value heads, r query heads a key-value head,
n = g·r query heads, e head size, m = g·(r+2)·e rows of the fused projection.

Layout of `qkv.weight` [m, d] and `qkv.bias` [m]: one group a key-value head; in a group first its r query heads, then
its key head, then its value head, e rows each. Any contiguous slice of whole groups is a smaller attention of its own,
which is what tensor parallelism cuts along dim 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.attention_context import Context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.kernels.attention_backward import is_padded, supports
from keepstep.models.linear import Fp8Linear, is_plain, make_linear
from keepstep.models.norm import RMSNorm, make_rms_norm
from keepstep.models.ops.backend import backend
from keepstep.models.ops.fp8 import Fp8Rows
from keepstep.models.ops.fused_attention import (
    ScoreRule,
    fused_attention,
    heads_attention,
    normed_attention,
    qkv_fused_attention,
)
from keepstep.models.ops.matmul import matmul_add
from keepstep.models.ops.rope import qkv_rope, split_apply_rope
from keepstep.models.ops.varlen_attention import varlen_attention
from keepstep.models.positions import apply_rope

_SINK_CHANNELS = 8
"""Channels that sinks add to each head."""


class Attention(nn.Module):
    """Project, apply rope, attend, project back. Head counts come from the tensors, so a slice of heads works too."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.head_size
        self.queries_per_group = config.heads // config.key_value_heads
        self.clip_qkv = config.clip_qkv
        self.plain_rope = config.plain_rope
        self.head_qk_norm = config.head_qk_norm
        self.has_rope = config.has_rope(layer)
        self.is_sliding = config.is_sliding(layer)
        self.plan = BlockPlan()
        rows = (config.heads + 2 * config.key_value_heads) * config.head_size
        self.qkv = make_linear(config, "qkv", config.hidden, rows, config.bias or config.qkv_bias)
        out_bias = config.bias or config.out_bias
        self.out = make_linear(config, "out", config.heads * config.head_size, config.hidden, out_bias)
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.attention_sinks else None
        self.query_norm = _qk_norm(config, config.heads)
        self.key_norm = _qk_norm(config, config.key_value_heads)

    def forward(self, x_btd: Tensor | Fp8Rows, context: Context, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual; added to the residual where that is given."""
        if self.is_sliding and context.sliding is not None:
            context = context.sliding
        rule = self._fused_rule(x_btd, context)
        if rule is not None:
            attn_out_btd = self._attend_fused(x_btd, self._rotary(context), rule)
        else:
            attn_out_btd = self._attend(x_btd, context)
        if residual_btd is not None:
            return matmul_add(attn_out_btd, self.out.weight.to(attn_out_btd.dtype), residual_btd)
        output_btd: Tensor = self.out(attn_out_btd)
        return output_btd

    def _attend(self, x_btd: Tensor | Fp8Rows, context: Context) -> Tensor:
        query_btne, key_btge, value_btge = self._project(x_btd, self._rotary(context))
        if context.cache is not None:
            key_btge, value_btge = context.cache.update(self.layer, key_btge, value_btge)
        run = self.plan.attend or attend
        return run(query_btne, key_btge, value_btge, self.plan.first_head, context, self.sinks).flatten(2)

    def _rotary(self, context: Context) -> tuple[Tensor, Tensor] | None:
        return context.rotary if self.has_rope else None

    def _fused_rule(self, x_btd: Tensor | Fp8Rows, context: Context) -> ScoreRule | None:
        """What our own operator must know to compute attention; None where its kernels do not support these rows."""
        if not (self.plan.fused_attention and supports(x_btd.shape[1], self.head_size, x_btd.dtype)):
            return None
        return context.fused_rule()

    def _attend_fused(self, x_btd: Tensor | Fp8Rows, rotary: tuple[Tensor, Tensor] | None, rule: ScoreRule) -> Tensor:
        if self._fuses_norms(rotary):
            return self._attend_normed(x_btd, rotary, rule)
        if not self.plain_rope or is_padded(self.head_size):
            return heads_attention(*self._project(x_btd, rotary), rule)
        if isinstance(x_btd, Tensor) and rotary is not None and self._fuses_projection():
            weight_md = self.qkv.weight.to(x_btd.dtype)
            return qkv_fused_attention(x_btd, weight_md, rotary, self.queries_per_group, self.head_size, rule)
        return fused_attention(self._qkv(x_btd), rotary, self.queries_per_group, self.head_size, rule)

    def _attend_normed(self, x_btd: Tensor | Fp8Rows, rotary: tuple[Tensor, Tensor] | None, rule: ScoreRule) -> Tensor:
        assert self.query_norm is not None
        assert self.key_norm is not None
        weights = self.query_norm.weight.to(x_btd.dtype), self.key_norm.weight.to(x_btd.dtype)
        eps = self.query_norm.eps
        return normed_attention(self._qkv(x_btd), weights, eps, rotary, self.queries_per_group, self.head_size, rule)

    def _fuses_norms(self, rotary: tuple[Tensor, Tensor] | None) -> bool:
        """Whether norms and rope are the plain ones, over whole heads."""
        whole = (rotary is None or 2 * rotary[0].shape[-1] == self.head_size) and not is_padded(self.head_size)
        # A subclass reads its weight in another way.
        return whole and type(self.query_norm) is RMSNorm and type(self.key_norm) is RMSNorm

    def _qkv(self, x_btd: Tensor | Fp8Rows) -> Tensor:
        qkv_btm: Tensor = self.qkv(x_btd)
        return qkv_btm.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else qkv_btm

    def _project(self, x_btd: Tensor | Fp8Rows, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        can_fuse = self._fuses_projection()
        if isinstance(x_btd, Tensor) and rotary is not None and can_fuse and backend().fuses_matmuls(x_btd):
            weight_md = self.qkv.weight.to(x_btd.dtype)
            return qkv_rope(x_btd, weight_md, *rotary, self.queries_per_group, self.head_size)
        qkv_btm = self._qkv(x_btd)
        if rotary is not None and self.plain_rope and backend().has_kernels(qkv_btm):
            query_btne, key_btge, value_btge = split_apply_rope(
                qkv_btm, *rotary, self.queries_per_group, self.head_size
            )
            return query_btne, key_btge, value_btge
        grouped = qkv_btm.unflatten(-1, (-1, self.queries_per_group + 2, self.head_size))
        query_btgre, key_btge, value_btge = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
        if self.query_norm is not None and self.key_norm is not None:
            query_btgre = self._normed(query_btgre, self.query_norm)
            key_btge = self._normed(key_btge, self.key_norm)
        if rotary is not None:
            query_btgre, key_btge = apply_rope(query_btgre, *rotary), apply_rope(key_btge, *rotary)
        return query_btgre.flatten(2, 3), key_btge, value_btge

    def _normed(self, x_bthe: Tensor, norm: RMSNorm) -> Tensor:
        """Queries or keys, normalised by head or over all heads."""
        normed: Tensor = norm(x_bthe if self.head_qk_norm else x_bthe.flatten(2))
        return normed.view(x_bthe.shape)

    def takes_fp8(self) -> bool:
        """Whether the input may be in fp8: one matmul is all that it enters."""
        return isinstance(self.qkv, Fp8Linear) and not self.plan.tensor_parallel

    def can_fuse_attention(self) -> bool:
        """Whether attention is the plain one."""
        return self.sinks is None

    def fuses_residual(self) -> bool:
        """Whether the last matmul may add the residual in its epilogue."""
        return self.plan.spans_matmuls and is_plain(self.out)

    def _fuses_projection(self) -> bool:
        return self.plan.spans_matmuls and is_plain(self.qkv) and not self.clip_qkv and self.plain_rope


def _qk_norm(config: ModelConfig, heads: int) -> RMSNorm | None:
    size = config.head_size * (1 if config.head_qk_norm else heads)
    return make_rms_norm(config, size) if config.qk_norm else None


def attend(
    query_btne: Tensor,
    key_bsge: Tensor,
    value_bsge: Tensor,
    first_head: int,
    context: Context,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention, [b, t, n, e]; the queries are the heads from `first_head` on.

    `sinks_n` are logits of keys whose values are zero, one a head.
    """
    if context.spans is not None:
        return varlen_attention(query_btne, key_bsge, value_bsge, context.spans, context.window, context.scale)
    heads = query_btne.shape[2]
    mask = context.mask
    if mask is not None and mask.shape[1] not in (1, heads):
        mask = mask.narrow(1, first_head, heads)
    if context.softcap:
        return _attend_capped(query_btne, key_bsge, value_bsge, mask, context)
    if sinks_n is not None:
        return _attend_with_sinks(query_btne, key_bsge, value_bsge, mask, context, sinks_n)
    groups = key_bsge.shape[2]
    if query_btne.shape[1] == 1 and groups < heads and not context.causal:
        return _attend_once(query_btne, key_bsge, value_bsge, mask, context.scale)
    attn_out_bnte = F.scaled_dot_product_attention(
        query_btne.transpose(1, 2),
        key_bsge.transpose(1, 2),
        value_bsge.transpose(1, 2),
        attn_mask=mask,
        is_causal=context.causal,
        scale=context.scale,
        enable_gqa=groups != heads,
    )
    return attn_out_bnte.transpose(1, 2)


def _attend_once(query_b1ne: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same for one token a row: the query heads of a group are the tokens of one head, so nothing is repeated."""
    query_bgre = query_b1ne.reshape(len(key), key.shape[2], -1, key.shape[3])
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(len(mask), *query_bgre.shape[1:3], -1)
    attn_out_bgre = F.scaled_dot_product_attention(
        query_bgre, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return attn_out_bgre.flatten(1, 2)[:, None]


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, context: Context, sinks_n: Tensor
) -> Tensor:
    """The same with one more key before all others, of value zero, whose score with a query is the head's sink.

    The sink is in a channel of its own that only this key has. So the kernels for plain attention compute it, whose
    memory does not grow with the square of the tokens.
    """
    size, scale = query.shape[-1], context.scale or query.shape[-1] ** -0.5
    causal = context.causal and mask is None
    sinks_btn1 = (sinks_n / scale).to(query.dtype).expand(query.shape[:3])[..., None]
    # Kernels want a multiple of 8 channels. A first query that is dropped again keeps the causal mask square.
    query = F.pad(torch.cat((query, sinks_btn1), dim=-1), (0, _SINK_CHANNELS - 1, 0, 0, int(causal), 0))
    key, value = (F.pad(part, (0, _SINK_CHANNELS, 0, 0, 1, 0)) for part in (key, value))
    key[:, 0, :, size] = 1.0
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
        # Kernels that take a mask take no groups.
        key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], dim=2) for part in (key, value))
    attn_out_bnte = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return attn_out_bnte[:, :, int(causal) :, :size].transpose(1, 2)


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, context: Context) -> Tensor:
    """The same with scores within ± the soft cap, by plain matmuls: torch's kernels do not cap scores."""
    repeats = query.shape[2] // key.shape[2]
    key_bnse, value_bnse = (part.transpose(1, 2).repeat_interleave(repeats, dim=1) for part in (key, value))
    scores_bnts = query.transpose(1, 2) @ key_bnse.transpose(2, 3)
    scale = context.scale or query.shape[-1] ** -0.5
    scores_bnts = context.softcap * torch.tanh(scores_bnts * (scale / context.softcap))
    if mask is None and context.causal:
        mask = torch.ones(scores_bnts.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores_bnts = scores_bnts.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_bnts + mask
    probability_bnts = scores_bnts.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (probability_bnts @ value_bnse).transpose(1, 2)


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, head_size: int) -> Tensor:
    """Separate projections, each [heads·e, ...] (weights or biases), in the grouped layout of `qkv`."""
    groups = key.shape[0] // head_size
    parts = [part.reshape(groups, -1, head_size, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def unpack_qkv(packed: Tensor, queries_per_group: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_qkv`."""
    grouped = packed.reshape(-1, queries_per_group + 2, head_size, *packed.shape[1:])
    query, key, value = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)
