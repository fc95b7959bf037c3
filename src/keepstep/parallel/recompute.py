"""Activation checkpointing: trade compute in the backward pass for memory held since the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from keepstep.config.schema import ModelConfig
from keepstep.models.size import parameter_count

Mode = Literal["none", "selective", "full"]

_STATE_BYTES = 14
"""A parameter's two halves, its gradient and two fp32 moments."""
_USABLE = 0.95
"""Share of a GPU's memory that tensors can count on; the rest is the context, workspaces and fragments."""

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class MemoryFacts:
    """What choosing by memory needs to know: this process's rows, its share of the state, its device."""

    microbatch: int
    state_ranks: int
    total_bytes: int


def choose_modes(config: ModelConfig, facts: MemoryFacts) -> list[Mode]:
    """For each block the least recomputation that fits: all start at full, then as many as fit keep more."""
    tokens = facts.microbatch * config.seq_len
    state_bytes = parameter_count(config) * _STATE_BYTES // facts.state_ranks
    # Logits with their gradient in place, and one block's activations while it is recomputed.
    working_bytes = tokens * config.padded_vocab * 2 + 2 * activation_bytes(config, tokens, "none")
    room = int(facts.total_bytes * _USABLE) - state_bytes - working_bytes
    room -= config.layers * activation_bytes(config, tokens, "full")
    modes: list[Mode] = ["full"] * config.layers
    steps: tuple[tuple[Mode, Mode], ...] = (("selective", "full"), ("none", "selective"))
    for better, worse in steps:
        extra = activation_bytes(config, tokens, better) - activation_bytes(config, tokens, worse)
        affordable = max(0, min(config.layers, room // extra))
        if "full" in modes and better == "none":
            break
        modes[:affordable] = [better] * affordable
        room -= affordable * extra
    return modes


def activation_bytes(config: ModelConfig, tokens: int, mode: Mode) -> int:
    """What one block keeps for the backward pass, in bf16."""
    qkv = (config.heads + 2 * config.key_value_heads) * config.head_size
    wide = config.ffn_size * (2 if config.activation == "swiglu" else 1)
    match mode:
        case "full":
            width = config.hidden
        case "selective":
            width = 4 * config.hidden + qkv + wide
        case "none":
            width = 6 * config.hidden + qkv + wide + config.ffn_size
    return 2 * tokens * width


def apply_recompute(block: nn.Module, mode: Mode) -> None:
    """Wrap the block's forward in place, so that parameter names stay as they are."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    block.forward = partial(checkpoint, block.forward, **options)
