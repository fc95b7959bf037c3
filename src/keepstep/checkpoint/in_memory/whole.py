"""A snapshot of whole tensors, as every data-parallel replica has it, serves any number of processes.

One process that has it sends it to all others. What belongs to a process alone, its random generators, stays with it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.in_memory.footer import read_footer
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import DTYPES, RANK_KEY, rank_name, split_state
from keepstep.checkpoint.protocol.shards import PieceSpec
from keepstep.checkpoint.protocol.tensor_slice import whole


def whole_fingerprint(specs: Sequence[PieceSpec]) -> str:
    """Identifies the tensors, whatever the number of processes; empty where a process holds only parts of them."""
    common = [spec for spec in specs if not spec.tensor.startswith(f"{RANK_KEY}.")]
    if any(spec.tensor_slice != whole(spec.tensor_shape) for spec in common):
        return ""
    tensors = sorted((spec.tensor, spec.dtype, spec.tensor_shape) for spec in common)
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def local_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """This process's memory of each tensor, by name."""
    tensors, _ = split_state(state)
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in tensors.items()}


def load_whole(processes: ProcessGroupInfo, source: int, fd: int | None, into: Mapping[str, Any]) -> dict[str, Any]:
    """Fill `into` with the snapshot that the process `source` has; returns its plain values. Collective.

    `fd` is this process's own snapshot of the same step, if it has one.
    """
    footer = read_footer(fd) if fd is not None else None
    values: dict[str, Any] = processes.gather(footer and footer["values"] if processes.rank == source else None)[source]
    if fd is None or footer is None:
        for tensor in _common(into):
            _broadcast(processes, source, torch.empty_like(tensor, device="cpu"), tensor)
        return values
    begin, size = footer["description"]
    rank, _, pieces = json.loads(os.pread(fd, size, begin))["layout"]
    specs = {spec.tensor: spec for spec in map(PieceSpec.from_json, pieces)}
    with mmap.mmap(fd, 0) as memory:
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        for name, tensor in local_tensors(into).items():
            own = name.startswith(f"{RANK_KEY}.")
            spec = specs[rank_name(name, rank) if own else name]
            piece = everything[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
            _broadcast(processes, None if own else source, piece.view(spec.tensor_slice.shape).clone(), tensor)
        del everything, piece
    return values


def _common(into: Mapping[str, Any]) -> list[torch.Tensor]:
    return [tensor for name, tensor in local_tensors(into).items() if not name.startswith(f"{RANK_KEY}.")]


def _broadcast(processes: ProcessGroupInfo, source: int | None, piece: torch.Tensor, into: torch.Tensor) -> None:
    if source is not None and processes.group is not None:
        # As bytes: not every dtype has a broadcast.
        dist.broadcast(piece.reshape(-1).view(torch.uint8), source, processes.group)
    with torch.no_grad():
        into.copy_(piece)
