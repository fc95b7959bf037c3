"""Activation checkpointing: trade compute in the backward pass for memory held since the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(block: nn.Module, mode: Literal["none", "selective", "full"]) -> None:
    """Wrap the block's forward in place, so that parameter names stay as they are."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    block.forward = partial(checkpoint, block.forward, **options)
