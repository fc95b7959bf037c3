"""Fully sharded data parallel (FSDP2): each block is one unit, what is left belongs to the root."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from keepstep.models.transformer import Transformer


@dataclass(frozen=True)
class ShardPolicy:
    """How weights are kept and when they are gathered."""

    compute_dtype: torch.dtype
    keep_gathered: bool
    offload: bool


def shard_model(model: Transformer, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    """Shard in place. Weights compute in `compute_dtype`; masters, gradients sums and reductions stay fp32.

    A (replicate, shard) mesh shards inside a group and copies across groups; a mesh of one process shards nothing
    and still runs the same code.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if policy.compute_dtype == torch.float32 else policy.compute_dtype,
        reduce_dtype=torch.float32,
        # Inputs are token ids and integer positions: casting them would be wrong.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if policy.offload else OffloadPolicy()
    for block in model.blocks.values():
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not policy.keep_gathered,
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
