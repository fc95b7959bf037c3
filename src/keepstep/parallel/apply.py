"""The one place that states the order: tensor split, activation checkpointing, compile, FSDP.

Each step builds on the one before: recomputation must run inside the compiled block, and FSDP must see the block
as it will be called.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from keepstep.config.schema import ComputeConfig, ParallelConfig
from keepstep.models.transformer import Transformer
from keepstep.parallel.fsdp import shard_model
from keepstep.parallel.recompute import apply_recompute


def apply_parallel(
    model: Transformer,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    compute: ComputeConfig,
    compute_dtype: torch.dtype,
) -> None:
    """Turn a model on the meta device into this process's part of it, in place."""
    blocks = list(model.blocks.values())
    for block in blocks:
        apply_recompute(block, compute.recompute)
        if compute.compile:
            block.forward = torch.compile(block.forward)
    shard_model(model, blocks, mesh["replicate", "shard"], compute_dtype, parallel.keep_gathered)
