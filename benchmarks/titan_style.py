"""The reference that docs/performance.md compares with: a Llama trained the way torchtitan trains one on one GPU.

Written from its published design: fp32 parameters, bf16 autocast, separate projections, torch.compile per block,
flash attention, compiled cross-entropy over the full logits, foreach gradient clipping, fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig


def _rope_table(seq_len: int, size: int, base: float) -> Tensor:
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _apply_rope(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None]).flatten(3).type_as(x)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, kv = config.hidden, config.key_value_heads * config.head_size
        self.wq, self.wk, self.wv = nn.Linear(d, d, False), nn.Linear(d, kv, False), nn.Linear(d, kv, False)
        self.wo = nn.Linear(d, d, False)
        self.w1, self.w3 = nn.Linear(d, config.ffn_size, False), nn.Linear(d, config.ffn_size, False)
        self.w2 = nn.Linear(config.ffn_size, d, False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d, config.norm_eps), nn.RMSNorm(d, config.norm_eps)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        c, (b, t, _) = self.config, x.shape
        h = self.attention_norm(x)
        q = _apply_rope(self.wq(h).view(b, t, c.heads, c.head_size), table).transpose(1, 2)
        k = _apply_rope(self.wk(h).view(b, t, c.key_value_heads, c.head_size), table).transpose(1, 2)
        v = self.wv(h).view(b, t, c.key_value_heads, c.head_size).transpose(1, 2)
        attn_out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attn_out.transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class TitanStyle(nn.Module):
    """Llama with separate projections and a tied or separate head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.register_buffer(
            "table", _rope_table(config.seq_len, config.head_size, config.rotary_base), persistent=False
        )
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(self.norm(x))


def titan_step(config: ModelConfig, rows: int, device: str = "cuda") -> Callable[[], Tensor]:
    """A function that runs one training step and returns its loss."""
    torch.manual_seed(0)
    with torch.device(device):
        model = TitanStyle(config)
    for block in model.blocks:
        block.compile(fullgraph=True)

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))

    loss_of = torch.compile(cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    own = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(0, config.vocab, (rows, config.seq_len + 1), device=device, generator=own)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    return step
