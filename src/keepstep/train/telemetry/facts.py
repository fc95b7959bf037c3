"""What a run writes down about itself and its machine, next to its configuration."""

from __future__ import annotations

import json
import os
import platform
import re
from typing import Any

import torch

from keepstep import __version__
from keepstep.config.schema import RunConfig
from keepstep.core.errors import KeepstepError
from keepstep.core.ranks import Ranks
from keepstep.core.units import Pace
from keepstep.data.loader import Loaders
from keepstep.models.size import parameter_count
from keepstep.observe.run_folder import RunFolder
from keepstep.parallel.world import World
from keepstep.plan.cluster import Machine
from keepstep.plan.report import plan_for_run
from keepstep.train.device import describe_machine, device_name

# What environment profiles and users set for NCCL, UCX, SHARP, torch and CUDA, and nothing that may be a credential.
_RECORDED = re.compile(r"(?!.*(TOKEN|SECRET|PASS|KEY|AUTH|CRED))(CUDA|NCCL|OMP|PYTORCH|SHARP|TORCH|TRITON|UCX)_\w+")


def known_facts(folder: RunFolder, ranks: Ranks) -> dict[str, Any]:
    """Facts from an earlier attempt with the same number of processes, so that a restart need not measure again."""
    if not ranks.restarts or not folder.facts.is_file():
        return {}
    facts: dict[str, Any] = json.loads(folder.facts.read_text())
    return facts if facts.get("world_size") == ranks.world_size else {}


def collect_facts(config: RunConfig, world: World, loaders: Loaders) -> dict[str, Any]:
    """What is true of the run next to its configuration, with its plan."""
    pace = Pace(config.global_batch, config.model.seq_len, loaders.train.samples_per_epoch)
    ranks = world.ranks
    machine = describe_machine(config, world.device, ranks.all_processes or ranks.world_size, ranks.local_world_size)
    return {
        "keepstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _RECORDED.fullmatch(name)},
        "device": device_name(world.device),
        "world_size": world.ranks.world_size,
        "threads": torch.get_num_threads(),
        "parameters": parameter_count(config.model),
        "total_steps": pace.steps(config.max_duration),
        "samples_per_epoch": loaders.train.samples_per_epoch,
        "tokenizer": str(loaders.tokenizer) if loaders.tokenizer else None,
        "data": loaders.facts,
        "plan": _plan(config, machine),
        "peak_flops": machine.peak_flops,
    }


def _plan(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """What the run should need and reach here. A plan that cannot be made must not keep a run from starting."""
    try:
        plan = plan_for_run(config, machine)
    except KeepstepError as error:
        return {"problem": error.message}
    speed, memory = plan["speed"], plan["memory"]
    headline = {name: speed[name] for name in ("step_s", "tokens_per_s", "mfu")}
    return {**headline, "memory_gib": memory["allocated_gib"], "details": plan}


def tracked(config: RunConfig) -> dict[str, Any]:
    """What experiment trackers store with a run."""
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
