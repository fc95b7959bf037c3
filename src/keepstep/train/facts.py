"""What a run writes down about itself and the machine it found, beside its configuration."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keepstep import __version__
from keepstep.config.schema import RunConfig
from keepstep.core.ranks import Ranks
from keepstep.data.loader import Loaders
from keepstep.models.size import parameter_count
from keepstep.observe.folder import RunFolder
from keepstep.parallel.world import World
from keepstep.train.build import compute_dtype, device_name, device_peak_flops
from keepstep.train.clock import Pace


@dataclass(frozen=True)
class Machine:
    """What a run finds itself on, in plain numbers."""

    device: str
    memory_bytes: int
    peak_flops: float
    precision: str
    processes: int
    processes_per_node: int


Planner = Callable[[RunConfig, Machine], dict[str, Any]]
"""What a run should need and reach on a machine; stored with it."""


def known_facts(folder: RunFolder, ranks: Ranks) -> dict[str, Any]:
    """What an earlier attempt with as many processes found out, so that a restart need not."""
    if not ranks.restarts or not folder.facts.is_file():
        return {}
    facts: dict[str, Any] = json.loads(folder.facts.read_text())
    return facts if facts.get("world_size") == ranks.world_size else {}


def facts_of(config: RunConfig, world: World, loaders: Loaders, planner: Planner | None) -> dict[str, Any]:
    """What is true of the run beside its configuration, its plan included where somebody makes one."""
    pace = Pace(config.global_batch, config.model.seq_len, loaders.train.samples_per_epoch)
    facts = {
        "keepstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "device": device_name(world.device),
        "world_size": world.ranks.world_size,
        "threads": torch.get_num_threads(),
        "parameters": parameter_count(config.model),
        "total_steps": pace.steps(config.max_duration),
        "samples_per_epoch": loaders.train.samples_per_epoch,
        "tokenizer": str(loaders.tokenizer) if loaders.tokenizer else None,
        "data": loaders.facts,
    }
    if planner is None:
        return facts
    machine = _machine(config, world)
    return {**facts, "plan": planner(config, machine), "peak_flops": machine.peak_flops}


def tracked(config: RunConfig) -> dict[str, Any]:
    """What an experiment tracker files a run under."""
    return {
        "model": config.model.preset,
        "parameters": parameter_count(config.model),
        "data": config.data.path,
        "global_batch": config.global_batch,
        "seq_len": config.model.seq_len,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "max_duration": str(config.max_duration),
        "seed": config.seed,
    }


def _machine(config: RunConfig, world: World) -> Machine:
    dtype = compute_dtype(config.precision, world.device)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    if world.device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.ranks.local_world_size
    return Machine(
        device=device_name(world.device),
        memory_bytes=memory_bytes,
        peak_flops=device_peak_flops(world.device, dtype),
        precision="fp8" if config.precision == "fp8" else name,
        processes=world.ranks.world_size,
        processes_per_node=world.ranks.local_world_size,
    )
