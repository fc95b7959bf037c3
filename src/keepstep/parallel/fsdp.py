"""Fully sharded data parallel (FSDP2): each block is one unit, what is left belongs to the root."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    keep_gathered: bool,
) -> None:
    """Shard in place. Weights compute in `compute_dtype`; masters, gradients sums and reductions stay fp32.

    A (replicate, shard) mesh shards inside a group and copies across groups; a mesh of one process shards nothing
    and still runs the same code.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        # Inputs are token ids and integer positions: casting them would be wrong.
        cast_forward_inputs=False,
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
