"""Multi-head latent attention: keys and values come out of one small vector of a token, and so may queries.

Shape legend: b rows, t query tokens, s key tokens, d hidden, n heads, e channels of a query or key, p of them rotated,
q = e - p others, v channels of a value, l latent of keys and values, r latent of queries.

Layout: the rotated channels of a head are its last ones, and its rotated key is shared by all heads.
`key_value_up.weight` [n·(q+v), l] has one group a head, first its q key rows and then its v value rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.attention import attend
from keepstep.models.attention_context import Context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.linear import is_plain, make_linear
from keepstep.models.norm import RMSNorm
from keepstep.models.ops.matmul import matmul_add
from keepstep.models.positions import apply_rope

_EPS = 1e-6
"""Of the norms of latents, whatever the other norms have."""


class LatentAttention(nn.Module):
    """Compress, normalise, expand, apply rope to a part of each head, attend, project back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size, self.value_size = config.head_size, config.value_size
        self.rotated = config.qk_rope_head_dim
        self.kept = config.head_size - config.qk_rope_head_dim
        self.latent_size = config.kv_lora_rank
        self.plan = BlockPlan()
        query_rank, query_rows = config.q_lora_rank, config.heads * config.head_size
        self.query_down = make_linear(config, "qkv", config.hidden, query_rank, False) if query_rank else None
        self.query_norm = RMSNorm(query_rank, _EPS) if query_rank else None
        self.query_up = make_linear(config, "qkv", query_rank or config.hidden, query_rows, False)
        self.key_value_down = make_linear(config, "qkv", config.hidden, config.kv_lora_rank + self.rotated, False)
        self.key_value_norm = RMSNorm(config.kv_lora_rank, _EPS)
        rows = config.heads * (self.kept + config.value_size)
        self.key_value_up = make_linear(config, "qkv", config.kv_lora_rank, rows, False)
        self.out = make_linear(config, "out", config.heads * config.value_size, config.hidden, False)

    def forward(self, x_btd: Tensor, context: Context, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual; added to the residual where that is given."""
        query_btne, key_bsne, value_bsnv = self._project(x_btd, context)
        if context.cache is not None:
            key_bsne, value_bsnv = context.cache.update(self.layer, key_bsne, value_bsnv)
        # Flash kernels want values as wide as keys; others need memory for whole matrices of scores.
        value_bsne = F.pad(value_bsnv, (0, self.head_size - self.value_size))
        run = self.plan.attend or attend
        attn_out_btd = run(query_btne, key_bsne, value_bsne, 0, context)[..., : self.value_size].flatten(2)
        if residual_btd is not None:
            return matmul_add(attn_out_btd, self.out.weight.to(attn_out_btd.dtype), residual_btd)
        output_btd: Tensor = self.out(attn_out_btd)
        return output_btd

    def _project(self, x_btd: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        assert context.rotary is not None, "config.rules demands rotary positions"
        latent = x_btd
        if self.query_down is not None and self.query_norm is not None:
            latent = self.query_norm(self.query_down(x_btd))
        query_btne = self.query_up(latent).unflatten(-1, (-1, self.head_size))
        query_btnq, query_btnp = query_btne.split((self.kept, self.rotated), dim=-1)
        latent_btl, key_btp = self.key_value_down(x_btd).split((self.latent_size, self.rotated), dim=-1)
        expanded = self.key_value_up(self.key_value_norm(latent_btl)).unflatten(-1, (-1, self.kept + self.value_size))
        key_btnq, value_btnv = expanded.split((self.kept, self.value_size), dim=-1)
        key_bt1p = apply_rope(key_btp[:, :, None], *context.rotary)
        key_btne = torch.cat((key_btnq, key_bt1p.expand(*key_btnq.shape[:3], -1)), dim=-1)
        return torch.cat((query_btnq, apply_rope(query_btnp, *context.rotary)), dim=-1), key_btne, value_btnv

    def can_fuse_attention(self) -> bool:
        """Never: our operator starts from queries, keys and values in one projection."""
        return False

    def fuses_residual(self) -> bool:
        """Whether the last matmul may add the residual in its epilogue."""
        return self.plan.spans_matmuls and is_plain(self.out)
