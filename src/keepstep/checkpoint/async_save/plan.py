"""Which pieces of a state each process writes; computed again only when the layout of the state changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import RANK_KEY, LocalShard, local_shard
from keepstep.checkpoint.protocol.manifest import ITEM_BYTES
from keepstep.checkpoint.protocol.shards import PieceSpec, lay_out
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice


@dataclass(frozen=True)
class SavePlan:
    """The pieces that this process writes, for one layout of the state."""

    layout: list[tuple[Any, ...]]
    specs: list[PieceSpec]
    size_bytes: int
    total_bytes: int
    """Of all processes together."""


def make_plan(shards: list[LocalShard], processes: ProcessGroupInfo) -> SavePlan:
    """Decide which process writes which slice. Collective."""
    specs, size_bytes = lay_out([shard.layout for shard in _assign_owners(shards, processes)])
    total_bytes = sum(processes.gather(size_bytes))
    return SavePlan([shard.layout for shard in shards], specs, size_bytes, total_bytes)


def _assign_owners(shards: list[LocalShard], processes: ProcessGroupInfo) -> list[LocalShard]:
    """The shards that this process writes; a slice that several processes hold goes to the least loaded of them."""
    mine = [shard for shard in shards if shard.owned and shard.tensor_slice.count]
    shared_slices = [
        (shard.name, shard.tensor_slice, shard.tensor_slice.count * ITEM_BYTES[shard.dtype])
        for shard in shards
        if shard.owned is None and shard.tensor_slice.count
    ]
    holders: dict[tuple[str, TensorSlice], list[int]] = {}
    size_bytes: dict[tuple[str, TensorSlice], int] = {}
    for holder, slices in enumerate(processes.gather(shared_slices)):
        for name, tensor_slice, size in slices:
            holders.setdefault((name, tensor_slice), []).append(holder)
            size_bytes[name, tensor_slice] = size
    load = [0] * processes.world_size
    won = set()
    for key in sorted(holders, key=lambda key: (-size_bytes[key], key)):
        owner = min(holders[key], key=lambda holder: (load[holder], holder))
        load[owner] += size_bytes[key]
        if owner == processes.rank:
            won.add(key)
    return mine + [shard for shard in shards if shard.owned is None and (shard.name, shard.tensor_slice) in won]


def shards_to_save(
    tensors: Mapping[str, torch.Tensor], processes: ProcessGroupInfo, full: bool
) -> dict[tuple[str, TensorSlice], LocalShard]:
    """This process's part of every tensor; with `full` (collective) whole tensors, each on one process."""
    rank, world_size = processes.rank, processes.world_size
    shards = [local_shard(name, tensor, rank, world_size) for name, tensor in tensors.items()]
    if full:
        shards = _gather_full(shards, tensors, processes)
    return {(shard.name, shard.tensor_slice): shard for shard in shards}


def _gather_full(
    shards: list[LocalShard], tensors: Mapping[str, torch.Tensor], processes: ProcessGroupInfo
) -> list[LocalShard]:
    """Every tensor whole on the first process that has it; state of single processes as it is.

    The first process is rank 0, except for the later stages of a pipeline, of which rank 0 has no part.
    """
    names = [shard.name for shard in shards if not shard.name.startswith(f"{RANK_KEY}.")]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    alike = len(set(processes.gather(digest))) == 1
    held_by = [set(names)] if alike else [set(others) for others in processes.gather(names)]
    gathered: list[LocalShard] = []
    for shard, tensor in zip(shards, tensors.values(), strict=True):
        if shard.name.startswith(f"{RANK_KEY}."):
            gathered.append(shard)
            continue
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if processes.rank == next(rank for rank, held in enumerate(held_by) if shard.name in held):
            # Copy to host memory one tensor at a time: the whole model need not fit on one device.
            gathered.append(local_shard(shard.name, full.detach().cpu(), 0, 1))
    return gathered
