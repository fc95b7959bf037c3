"""Joining the other processes: one group over gloo on CPUs, NCCL (with gloo for host values) on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from keepstep.core.errors import HardwareError
from keepstep.core.proc import available_cores
from keepstep.core.ranks import Ranks


@dataclass(frozen=True)
class World:
    """This process, its device and its peers."""

    ranks: Ranks
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.ranks.is_first


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device this process computes on; an explicit wish that cannot be met is an error."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HardwareError(
            "compute.device is cuda, but torch finds no GPU here", "check nvidia-smi, or compute.device=cpu"
        )
    if local_rank >= torch.cuda.device_count():
        raise HardwareError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}",
            "start at most one process a GPU (--procs)",
        )
    return torch.device("cuda", local_rank)


def share_cores(threads: int, local_world_size: int) -> None:
    """Give each process its part of the cores: the default, all cores to each, makes them fight."""
    torch.set_num_threads(threads or max(1, available_cores() // local_world_size))


@contextmanager
def joined_world(ranks: Ranks, device: torch.device, timeout_s: float = 600.0) -> Iterator[World]:
    """The process group for the length of a run; a single process gets a group of one, so that code has one path."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = not ranks.launched or (bool(ranks.coordinator) and ranks.world_size == 1)
    if ranks.store_file and not alone:
        where = f"file://{ranks.store_file}"
        options = {"init_method": where, "rank": ranks.rank_in_group, "world_size": ranks.world_size}
    elif alone:
        # A store inside this process: a group of one needs no port.
        options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
    try:
        yield World(ranks, device)
    finally:
        dist.destroy_process_group()
