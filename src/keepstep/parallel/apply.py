"""The one place that states the order: pipeline split, tensor and row split, activation checkpointing, compile, FSDP.

Each step builds on the one before: a stage is a smaller model, recomputation must run inside the compiled block, and
FSDP must see the block as it will be called.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepstep.config.schema import ComputeConfig, ParallelConfig
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.context import split_rows
from keepstep.parallel.fsdp import ShardPolicy, shard_model
from keepstep.parallel.mesh import Grid
from keepstep.parallel.pipeline import split_stages
from keepstep.parallel.recompute import Mode, apply_recompute
from keepstep.parallel.tensor import split_tensors
from keepstep.parallel.vocabulary import repeat_output


def apply_parallel(
    model: Transformer,
    grid: Grid,
    parallel: ParallelConfig,
    compute: ComputeConfig,
    shard_dtype: torch.dtype | None,
    modes: Sequence[Mode],
) -> list[Transformer]:
    """Turn a model on the meta device into this process's part of it, in place.

    `shard_dtype` is the precision that sharded weights compute in; None leaves the model whole. `modes` says for each
    block what it recomputes. Returns what is to be called: the model itself, or where there is a pipeline this
    process's stages of it, whose parameters are the model's.
    """
    stages = split_stages(model, grid.pipeline_rank, grid.layout.pipeline, parallel.stages_per_process)
    piped = grid.layout.pipeline > 1
    # A pipeline runs many micro batches through the same weights: gathering them each time costs more than it saves.
    keep_gathered = parallel.keep_gathered or piped
    for stage in stages:
        if grid.layout.tensor > 1:
            split_tensors(stage, grid.mesh["tensor"], parallel.async_tensor)
        if piped and parallel.schedule == "zero_bubble":
            repeat_output(stage, is_split=grid.layout.tensor > 1)
        if grid.context_group is not None:
            split_rows(stage, grid.context_group)
        for layer, block in stage.blocks.items():
            assert isinstance(block, Block)
            block.hands_over = shard_dtype is None and modes[int(layer)] == "none"
            # Selective recomputation keeps what products give, and computes again what is between them.
            if modes[int(layer)] == "selective" or not compute.joined_products:
                block.keep_products_apart()
            apply_recompute(block, modes[int(layer)])
            if compute.compile:
                block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        if shard_dtype is not None:
            shard_model(stage, grid.weights_mesh, ShardPolicy(shard_dtype, keep_gathered, parallel.offload))
    return stages
