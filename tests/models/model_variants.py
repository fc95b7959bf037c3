"""Small models that differ in one way each."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.config.schema import ExpertsConfig, ModelConfig
from keepstep.models.init import init_weights
from keepstep.models.ops.backend import KernelBackend
from keepstep.models.transformer import Transformer

TINY: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq_len": 24}
LLAMA: dict[str, Any] = {
    **TINY, "kv_heads": 2, "ffn_hidden": 48, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
    "bias": False, "tied": False,
}  # fmt: skip

VARIANTS: dict[str, ModelConfig] = {
    "learned": ModelConfig(**TINY),
    "alibi": ModelConfig(**TINY, positions="alibi", bias=False),
    "no positions": ModelConfig(**TINY, positions="none"),
    "grouped rotary": ModelConfig(**LLAMA),
    "one key-value head": ModelConfig(**{**LLAMA, "kv_heads": 1}),
    "sliding window": ModelConfig(**LLAMA, sliding_window=5),
    "grouped alibi window": ModelConfig(**{**LLAMA, "positions": "alibi"}, sliding_window=7),
    "query and key norm": ModelConfig(**LLAMA, qk_norm=True, qkv_bias=True, head_dim=12),
    "partial rotary": ModelConfig(**LLAMA, partial_rotary_factor=0.75),
    "norms after": ModelConfig(**LLAMA, norm_placement="after", qk_norm=True, head_qk_norm=False),
    "multipliers": ModelConfig(
        **LLAMA, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0
    ),
    "layers without rope": ModelConfig(**LLAMA, no_rope_layer_interval=2),
    "two kinds of layers": ModelConfig(
        **LLAMA, sliding_window=5, layer_types=("sliding_attention", "full_attention"), rotary_local_base=500.0
    ),
    "gemma": ModelConfig(
        **{
            **LLAMA,
            "norm": "rmsnorm_1p",
            "norm_placement": "both",
            "activation": "geglu_tanh",
            "qk_norm": True,
            "sliding_window": 5,
            "layer_types": ("sliding_attention", "full_attention"),
            "embedding_multiplier": 32**0.5,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
            "vocab_multiple": 16,
            "head_dim": 12,
        }
    ),
    "experts": ModelConfig(**LLAMA, experts=ExpertsConfig(count=4, top_k=2, ffn_hidden=16)),
    "grouped experts": ModelConfig(
        **{**LLAMA, "layers": 3},
        experts=ExpertsConfig(
            count=8, top_k=3, ffn_hidden=16, scores="sigmoid", scale=2.5, shared_ffn_hidden=24, shared_gate=True,
            groups=4, top_groups=2, first_dense_layers=1, balance_bias=True,
        ),
    ),
    "sinks and clipped experts": ModelConfig(
        **LLAMA, sliding_window=5, layer_types=("sliding_attention", "full_attention"), attention_sinks=True,
        qkv_bias=True, out_bias=True, head_dim=12,
        experts=ExpertsConfig(count=4, top_k=2, ffn_hidden=16, bias=True, swiglu_limit=7.0),
    ),
    "latent attention": ModelConfig(
        **{**LLAMA, "kv_heads": 0}, kv_lora_rank=16, q_lora_rank=12, head_dim=14, qk_rope_head_dim=6, v_head_dim=10,
        rotary_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    "rope by length": ModelConfig(
        **LLAMA,
        rotary_scaling={
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.2, 2.0, 4.0, 8.0],
        },
    ),
    "padded vocabulary": ModelConfig(**LLAMA, vocab_multiple=64, clip_qkv=0.05),
}  # fmt: skip


def build(config: ModelConfig, seed: int = 17) -> Transformer:
    """A model as training builds it: on the meta device first."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


def random_tokens(config: ModelConfig, rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab, (rows, tokens), generator=generator)


class FusedOnCpu(KernelBackend):
    """Runs fused operators in the form that every device can compute."""

    def has_kernels(self, tensor: torch.Tensor) -> bool:
        return True

    def fuses_matmuls(self, tensor: torch.Tensor) -> bool:
        return True
