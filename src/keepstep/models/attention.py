"""Causal self-attention with grouped key-value heads.

Shape legend: b rows, t query tokens, s key tokens, d hidden, g key-value heads, r query heads a key-value head,
n = g·r query heads, e head size, m = g·(r+2)·e rows of the fused projection.

Layout of `qkv.weight` [m, d] and `qkv.bias` [m]: one group a key-value head; in a group first its r query heads, then
its key head, then its value head, e rows each. Any contiguous slice of whole groups is a smaller attention of its own,
which is what tensor parallelism cuts along dim 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.added import add_product
from keepstep.models.causal import attend_fused, project_and_attend, takes
from keepstep.models.documents import attend_documents
from keepstep.models.linear import is_plain, make_linear
from keepstep.models.masks import Context
from keepstep.models.norm import RMSNorm
from keepstep.models.positions import rotate
from keepstep.models.turn import project_and_turn, split_and_turn


class Attention(nn.Module):
    """Project, turn, attend, project back. Head counts come from the tensors, so a slice of heads works too."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.head_size
        self.queries_per_group = config.heads // config.key_value_heads
        self.clip_qkv = config.clip_qkv
        self.first_head = 0
        """Number of the first local query head; tensor parallelism sets it, ALiBi slopes depend on it."""
        rows = (config.heads + 2 * config.key_value_heads) * config.head_size
        self.qkv = make_linear(config.linear, config.hidden, rows, config.bias or config.qkv_bias)
        self.out = make_linear(config.linear, config.heads * config.head_size, config.hidden, config.bias)
        self.attend: Callable[..., Tensor] = attend
        """Context parallelism puts ring attention here."""
        self.at_once = False
        """Whether plain causal attention may be computed together with what surrounds it: see `may_attend_at_once`."""
        self.joined = True
        """Whether one operator may span the projection and what follows. Tensor parallelism splits the projection, and
        selective recomputation keeps what it gives: both say no."""
        self.query_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None

    def forward(self, x_btd: Tensor, context: Context, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual; added to the residual where that is given."""
        mixed_btd = (
            self._mix_at_once(x_btd, context.rotary) if self._is_one(x_btd, context) else self._mix(x_btd, context)
        )
        if residual_btd is not None:
            return add_product(mixed_btd, self.out.weight.to(mixed_btd.dtype), residual_btd)
        output_btd: Tensor = self.out(mixed_btd)
        return output_btd

    def _mix(self, x_btd: Tensor, context: Context) -> Tensor:
        query_btne, key_btge, value_btge = self._project(x_btd, context.rotary)
        if context.cache is not None:
            key_btge, value_btge = context.cache.update(self.layer, key_btge, value_btge)
        return self.attend(query_btne, key_btge, value_btge, self.first_head, context).flatten(2)

    def _is_one(self, x_btd: Tensor, context: Context) -> bool:
        """Whether one operator may do all between the projection, or what comes before it, and the output."""
        return self.at_once and context.is_plain() and takes(x_btd.shape[1], self.head_size, x_btd.dtype)

    def _mix_at_once(self, x_btd: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        if rotary is not None and self._spans_projection():
            weight_md = self.qkv.weight.to(x_btd.dtype)
            return project_and_attend(x_btd, weight_md, rotary, self.queries_per_group, self.head_size)
        return attend_fused(self._fused(x_btd), rotary, self.queries_per_group, self.head_size)

    def _fused(self, x_btd: Tensor) -> Tensor:
        qkv_btm: Tensor = self.qkv(x_btd)
        return qkv_btm.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else qkv_btm

    def _project(self, x_btd: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        if rotary is not None and x_btd.is_cuda and self._spans_projection():
            weight_md = self.qkv.weight.to(x_btd.dtype)
            return project_and_turn(x_btd, weight_md, *rotary, self.queries_per_group, self.head_size)
        qkv_btm = self._fused(x_btd)
        if rotary is not None and self.query_norm is None and splits_and_turns_at_once(qkv_btm):
            query_btne, key_btge, value_btge = split_and_turn(qkv_btm, *rotary, self.queries_per_group, self.head_size)
            return query_btne, key_btge, value_btge
        grouped = qkv_btm.unflatten(-1, (-1, self.queries_per_group + 2, self.head_size))
        query_btgre, key_btge, value_btge = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
        if self.query_norm is not None and self.key_norm is not None:
            query_btgre, key_btge = self.query_norm(query_btgre), self.key_norm(key_btge)
        if rotary is not None:
            query_btgre, key_btge = rotate(query_btgre, *rotary), rotate(key_btge, *rotary)
        return query_btgre.flatten(2, 3), key_btge, value_btge

    def may_attend_at_once(self) -> bool:
        """Whether nothing stands between the projection and attention, and attention is the plain one."""
        return self.joined and self.query_norm is None and self.attend is attend

    def adds_inside(self) -> bool:
        """Whether the last product may take the residual."""
        return self.joined and is_plain(self.out)

    def _spans_projection(self) -> bool:
        return self.joined and is_plain(self.qkv) and not self.clip_qkv and self.query_norm is None


def splits_and_turns_at_once(qkv_btm: Tensor) -> bool:
    """Whether one kernel takes the projection apart; a CPU has none, and can differentiate its own operators twice."""
    return qkv_btm.is_cuda


def attend(query_btne: Tensor, key_bsge: Tensor, value_bsge: Tensor, first_head: int, context: Context) -> Tensor:
    """Scaled dot-product attention, [b, t, n, e]; the queries are the heads from `first_head` on."""
    if context.bounds is not None:
        return attend_documents(query_btne, key_bsge, value_bsge, context.bounds, context.window)
    heads = query_btne.shape[2]
    mask = context.mask
    if mask is not None and mask.shape[1] not in (1, heads):
        mask = mask.narrow(1, first_head, heads)
    mixed_bnte = F.scaled_dot_product_attention(
        query_btne.transpose(1, 2),
        key_bsge.transpose(1, 2),
        value_bsge.transpose(1, 2),
        attn_mask=mask,
        is_causal=context.causal,
        enable_gqa=key_bsge.shape[2] != heads,
    )
    return mixed_bnte.transpose(1, 2)


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
