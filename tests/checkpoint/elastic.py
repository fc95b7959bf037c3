"""Save on {1,2,3,4,8} processes in several layouts, load each on {1,2,3,4,8}: every tensor bit-equal after gathering.

    python -m tests.checkpoint.elastic [--worlds 1,2,3,4,8]

Layouts: `shard` (FSDP's, uneven rows included), `tensor` (tensor parallel × data parallel by hand, columns and rows),
`fsdp_tp` (fully_shard over a tensor-parallel model, the strided placements of FSDP2) and `stages` (each process holds
different tensors, as pipeline stages do). Processes are forked from this one, which has torch imported already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.schema import CheckpointConfig

SHAPES = {"up.weight": (48, 33), "up.bias": (48,), "down.weight": (33, 48), "down.bias": (33,), "scale": ()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(33, 48)
        self.down = nn.Linear(48, 33)


def full_tensors(zero: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["half"] = torch.randn(700, 130, generator=generator).bfloat16()
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} if zero else tensors


def layouts_for(world: int) -> list[str]:
    return ["shard", *(["tensor"] if world % 2 == 0 else []), *(["fsdp_tp"] if world % 4 == 0 else []), "stages"]


def build(layout: str, world: int, rank: int, zero: bool) -> dict[str, Any]:
    """The same state in one layout, on this process."""
    full = full_tensors(zero)
    if world == 1:
        return full
    if layout == "shard":
        mesh = init_device_mesh("cpu", (world,))
        placed = {
            name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() else Replicate()])
            for name, tensor in full.items()
        }
        return {**placed, "up.bias": full["up.bias"]}  # one that is plainly replicated
    if layout == "stages":
        return {
            name: tensor
            for number, (name, tensor) in enumerate(full.items())
            if number % world == rank or name == "scale"
        }
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    if layout == "tensor":
        places = {
            "up.weight": (Shard(0), Shard(1)),
            "down.weight": (Replicate(), Shard(1)),
            "half": (Shard(1), Shard(0)),
        }
        both = (Replicate(), Replicate())
        return {name: distribute_tensor(tensor, grid, places.get(name, both)) for name, tensor in full.items()}
    model = Model()
    parallelize_module(model, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["data"])
    tensors: dict[str, Any] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(distribute_tensor(full[name], tensor.device_mesh, tensor.placements))
    return {**tensors, "half": full["half"], "scale": full["scale"]}


def gathered(tensors: dict[str, Any], world: int, layout: str) -> dict[str, torch.Tensor]:
    """Every tensor whole, on every process."""
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    if world > 1 and layout == "stages":
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, whole)
        whole = {name: tensor for part in parts for name, tensor in part.items()}
    return whole


def save_all(world: int, rank: int, root: Path) -> None:
    for layout in layouts_for(world):
        for form in ("sharded", "full"):
            folder = root / f"{world}-{layout}-{form}"
            checkpointer = Checkpointer(folder, CheckpointConfig(format=form))  # type: ignore[arg-type]
            state = {"model": build(layout, world, rank, zero=False), "rank": {"random": torch.full((3,), rank)}}
            checkpointer.save(1, state, {"world": world})
            checkpointer.close()


def load_all(world: int, rank: int, root: Path) -> None:
    expected = full_tensors(zero=False)
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        for layout in layouts_for(world):
            into = {"model": build(layout, world, rank, zero=True), "rank": {"random": torch.full((3,), -1)}}
            checkpointer = Checkpointer(folder, CheckpointConfig())
            loaded = checkpointer.load_newest(into)
            assert loaded is not None
            whole = gathered(into["model"], world, layout)
            for name, tensor in expected.items():
                assert torch.equal(whole[name], tensor), f"{folder.name} on {world} as {layout}: {name} differs"
            own = rank if rank < loaded.world_size else -1
            assert into["rank"]["random"].tolist() == [own] * 3, f"{folder.name} on {world}: rank state"
            checkpointer.close()
            if rank == 0:
                with (root / "pairs").open("a") as file:
                    file.write(f"{folder.name} -> {world}-{layout}\n")


def run_world(world: int, root: Path, action: Callable[[int, int, Path], None]) -> None:
    """Fork one process a rank and wait for all of them."""
    with tempfile.TemporaryDirectory() as meeting:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if not pid:
                try:
                    if world > 1:
                        place = f"file://{meeting}/rendezvous"
                        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
                    action(world, rank, root)
                    if world > 1:
                        dist.barrier()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise SystemExit(f"{action.__name__} on {world} processes failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,3,4,8")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worlds = [int(word) for word in args.worlds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            run_world(world, Path(folder), save_all)
        for world in worlds:
            run_world(world, Path(folder), load_all)
        pairs = (Path(folder) / "pairs").read_text().splitlines()
    print(json.dumps({"pairs": len(pairs)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
