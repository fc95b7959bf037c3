"""This machine before a run starts on it: its GPUs, its processes, its memory. Needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from keepstep.config.schema import RunConfig
from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value
from keepstep.core.proc import available_memory_bytes
from keepstep.plan.capacity import HostMachine, check_host_memory

_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> int:
    """GPUs that a process on this machine sees."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([word for word in chosen.split(",") if word.strip() not in ("", "-1")])
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def process_count(wanted: str, device: str, spares: int = 0) -> int:
    """`auto` is one process per GPU that no spare process needs, or one where there is none."""
    if wanted == "auto":
        return 1 if device == "cpu" else max(1, visible_gpus() - spares)
    if not wanted.isdigit() or int(wanted) < 1:
        raise UsageError(invalid_value("--procs", wanted, "must be auto or a whole number from 1"), "--procs 2")
    return int(wanted)


def check_memory_here(config: RunConfig, processes: int, processes_here: int) -> None:
    """Raise where this machine cannot hold what the run keeps in host memory: the kernel would kill it later."""
    gpu = config.compute.device != "cpu" and visible_gpus() > 0
    # Without a sign of a GPU and without offload, the processes themselves know best where their tensors are.
    if config.parallel.offload or config.compute.device == "cpu":
        machine = HostMachine(processes, processes_here, gpu, available_memory_bytes())
        for warning in check_host_memory(config, machine):
            print(warning, file=sys.stderr)
