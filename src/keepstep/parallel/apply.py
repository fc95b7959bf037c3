"""The one place that states the order: tensor split, activation checkpointing, compile, FSDP.

Each step builds on the one before: recomputation must run inside the compiled block, and FSDP must see the block
as it will be called.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from keepstep.config.schema import ComputeConfig, ParallelConfig
from keepstep.models.transformer import Transformer
from keepstep.parallel.fsdp import shard_model
from keepstep.parallel.recompute import Mode, apply_recompute


def apply_parallel(
    model: Transformer,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    compute: ComputeConfig,
    shard_dtype: torch.dtype | None,
    modes: Sequence[Mode],
) -> None:
    """Turn a model on the meta device into this process's part of it, in place.

    `shard_dtype` is the precision that sharded weights compute in; None leaves the model whole. `modes` says for each
    block what it recomputes.
    """
    blocks = list(model.blocks.values())
    for block, mode in zip(blocks, modes, strict=True):
        apply_recompute(block, mode)
        if compute.compile:
            block.forward = torch.compile(block.forward)
    if shard_dtype is not None:
        shard_model(model, blocks, mesh["replicate", "shard"], shard_dtype, parallel.keep_gathered)
