"""Measure what a job over many nodes will meet: matrix products, collectives, links, storage, data, clocks."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.parallel.world import World


@dataclass(frozen=True)
class ProbeSettings:
    """How much to measure."""

    storage: Path | None = None
    """Folder on shared storage to write to and read from."""
    data: Path | None = None
    """Training data that every node must be able to read."""
    storage_bytes: int = 64 << 20
    allreduce_bytes: int = 0
    """0 chooses by device: 1 GiB on GPUs, 8 MiB on CPUs."""


def node_name() -> str:
    """As Slurm or Kubernetes calls this node (a pod has a host name of its own), or as it calls itself."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("KEEPSTEP_NODE") or socket.gethostname()


def probe(world: World, settings: ProbeSettings, known: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Measure on every process, with what is `known` of its node; the first returns all reports, the others None."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {"rank": world.ranks.rank, "node": node_name(), "device": name, **known}
    report["gemm_tflops"] = _gemm_tflops(device)
    report["allreduce_gb_s"] = _allreduce_gb_s(world, settings.allreduce_bytes)
    report["clock_skew_s"] = _clock_skew_s()
    if world.ranks.local_rank == 0:
        report |= _storage(settings, world.ranks.rank)
        report |= _data(settings.data)
    report |= _link(world, report["node"])
    gathered: list[Any] | None = [None] * world.ranks.world_size if world.is_first else None
    dist.gather_object(report, gathered)
    return gathered


def _gemm_tflops(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def product() -> None:
        torch.mm(a, b)
        _settle(device)

    # The best of many: a neighbour that takes the core for a moment must not make this one look slow.
    return 2 * size**3 / _best_s(product, 20) / 1e12


def _allreduce_gb_s(world: World, size_bytes: int) -> float:
    ranks, device = world.ranks.world_size, world.device
    if ranks == 1:
        return 0.0
    size_bytes = size_bytes or (1 << 30 if device.type == "cuda" else 8 << 20)
    tensor = torch.ones(size_bytes // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(tensor)
        tensor.fill_(1.0)
        _settle(device)

    # Bus bandwidth as NCCL's own tests define it: each byte crosses the slowest link 2(n-1)/n times.
    return size_bytes * 2 * (ranks - 1) / ranks / _best_s(reduce, 5) / 1e9


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best_s(action: Callable[[], None], times: int) -> float:
    action()
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def _clock_skew_s() -> float:
    """This process's wall clock against the median of all, at the moment all leave a barrier."""
    skews = []
    for _ in range(5):
        dist.barrier()
        mine = torch.tensor([time.time()], dtype=torch.float64)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        skews.append(mine.item() - statistics.median(clock.item() for clock in everyone))
    return min(skews, key=abs)


def _storage(settings: ProbeSettings, rank: int) -> dict[str, Any]:
    if settings.storage is None:
        return {}
    path = settings.storage / f".keepstep-doctor-{rank}-{os.getpid()}"
    block = os.urandom(1 << 20)
    blocks = settings.storage_bytes >> 20
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        with path.open("rb") as file:
            # What was just written lies in memory; the disk is what we ask about.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            for _ in range(blocks):
                if file.read(1 << 20) != block:
                    return {"storage_error": f"{settings.storage}: read back other bytes than were written"}
        read_s = time.perf_counter() - started
    except OSError as error:
        return {"storage_error": f"{settings.storage}: {error.strerror}"}
    finally:
        # On a disk that refuses writes there is nothing to remove, and it refuses that too.
        with contextlib.suppress(OSError):
            path.unlink()
    return {"write_gb_s": (blocks << 20) / write_s / 1e9, "read_gb_s": (blocks << 20) / read_s / 1e9}


def _data(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        file = path if path.is_file() else next(child for child in sorted(path.rglob("*")) if child.is_file())
        with file.open("rb") as opened:
            opened.read(16 << 20)
    except StopIteration:
        return {"data_error": f"{path}: no file there"}
    except OSError as error:
        return {"data_error": f"{path}: {error.strerror}"}
    return {}


def _link(world: World, node: str) -> dict[str, Any]:
    """Speed of the link from the node before this one, over a ring of one process a node."""
    places: list[Any] = [None] * world.ranks.world_size
    dist.all_gather_object(places, (node, world.ranks.local_rank))
    leaders = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0]
    if len(leaders) < 2 or world.ranks.local_rank != 0:
        dist.barrier()
        return {}
    place = leaders.index(world.ranks.rank)
    before, after = leaders[place - 1], leaders[(place + 1) % len(leaders)]
    size = 256 << 20 if world.device.type == "cuda" else 4 << 20
    outgoing, incoming = (torch.ones(size // 4, device=world.device) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        # One after the other around the ring, so that a slow link delays its own measurement only.
        for turn in range(len(leaders)):
            if turn == place:
                dist.send(outgoing[:1], after)
                dist.send(outgoing, after)
            elif leaders[turn] == before:
                # The first word says that it is our turn; the clock runs for the second.
                dist.recv(incoming[:1], before)
                _settle(world.device)
                started = time.perf_counter()
                dist.recv(incoming, before)
                _settle(world.device)
                best = min(best, time.perf_counter() - started)
    dist.barrier()
    return {"link_from": places[before][0], "link_gb_s": size / best / 1e9}
