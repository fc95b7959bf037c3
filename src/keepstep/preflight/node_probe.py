"""Measure what a job over many nodes depends on: matrix multiplication, collectives, links, storage, data, clocks."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.core.ranks import from_environment
from keepstep.parallel.world import World, choose_device, joined_world
from keepstep.preflight.machine import inactive_links

STORAGE_BYTES = 64 << 20


def node_name() -> str:
    """This node's name in Slurm or Kubernetes (a pod's host name is the pod's own), or else its host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("KEEPSTEP_NODE") or socket.gethostname()


def run_probe(storage: Path | None, data: Path | None) -> list[dict[str, Any]] | None:
    """Join the other processes and measure; the first process returns all reports, the others None.

    `storage` is a folder on shared storage to write to and read from; every node must be able to read `data`.
    """
    ranks = from_environment()
    with joined_world(ranks, choose_device("auto", ranks.local_rank), timeout_s=120) as world:
        return _probe(world, storage, data)


def _probe(world: World, storage: Path | None, data: Path | None) -> list[dict[str, Any]] | None:
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {"rank": world.ranks.rank, "node": node_name(), "device": name}
    report["inactive_links"] = inactive_links()
    report["gemm_tflops"] = _gemm_tflops(device)
    report["allreduce_gb_s"] = _allreduce_gb_s(world)
    report["clock_skew_s"] = _clock_skew_s()
    if world.ranks.local_rank == 0:
        report |= _storage(storage, world.ranks.rank) if storage else {}
        report |= _data(data) if data else {}
    report |= _link(world, report["node"])
    gathered: list[Any] | None = [None] * world.ranks.world_size if world.is_first else None
    dist.gather_object(report, gathered)
    return gathered


def _gemm_tflops(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(a, b)
        _synchronize(device)

    # The best of many: another program that takes the core for a moment must not make this node look slow.
    return 2 * size**3 / _best_s(multiply, 20) / 1e12


def _allreduce_gb_s(world: World) -> float:
    ranks, device = world.ranks.world_size, world.device
    if ranks == 1:
        return 0.0
    size_bytes = 1 << 30 if device.type == "cuda" else 8 << 20
    tensor = torch.ones(size_bytes // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(tensor)
        tensor.fill_(1.0)
        _synchronize(device)

    # Bus bandwidth as NCCL's own tests define it: each byte crosses the slowest link 2(n-1)/n times.
    return size_bytes * 2 * (ranks - 1) / ranks / _best_s(reduce, 5) / 1e9


def _synchronize(device: torch.device) -> None:
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
    """This process's wall clock minus the median of all, read when all leave a barrier."""
    skews = []
    for _ in range(5):
        dist.barrier()
        mine = torch.tensor([time.time()], dtype=torch.float64)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        skews.append(mine.item() - statistics.median(clock.item() for clock in everyone))
    return min(skews, key=abs)


def _storage(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f".keepstep-doctor-{rank}-{os.getpid()}"
    block = os.urandom(1 << 20)
    blocks = STORAGE_BYTES >> 20
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        with path.open("rb") as file:
            # What was just written is in the page cache; this drops it, so that the disk is measured.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            for _ in range(blocks):
                if file.read(1 << 20) != block:
                    return {"storage_error": f"{folder}: other bytes are read than were written"}
        read_s = time.perf_counter() - started
    except OSError as error:
        return {"storage_error": f"{folder}: {error.strerror}"}
    finally:
        # A disk that refuses writes also refuses to delete, and then there is nothing to delete.
        with contextlib.suppress(OSError):
            path.unlink()
    return {"write_gb_s": (blocks << 20) / write_s / 1e9, "read_gb_s": (blocks << 20) / read_s / 1e9}


def _data(path: Path) -> dict[str, Any]:
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
    """Speed of the link from the previous node, over a ring of one process per node."""
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
        # One node after another around the ring, so that a slow link delays only its own measurement.
        for sender in range(len(leaders)):
            if sender == place:
                dist.send(outgoing[:1], after)
                dist.send(outgoing, after)
            elif leaders[sender] == before:
                # The first message says that the sender is ready; the second is timed.
                dist.recv(incoming[:1], before)
                _synchronize(world.device)
                started = time.perf_counter()
                dist.recv(incoming, before)
                _synchronize(world.device)
                best = min(best, time.perf_counter() - started)
    dist.barrier()
    return {"link_from": places[before][0], "link_gb_s": size / best / 1e9}
