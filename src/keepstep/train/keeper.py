"""How often the state is copied into memory that survives the processes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.memory import StepMemory
from keepstep.config.schema import ResilienceConfig
from keepstep.train.clock import Clock
from keepstep.train.state import TrainState

OWN_BUFFERS = 2
"""Of the memory that an agent gives a process; the rest is for a copy of another node's."""
MEASURED_STEPS = 4
"""Steps after which the interval is chosen, from what copies and steps took so far."""
MOST_OVERHEAD = 0.05
"""Share of a step that copies may cost on a CPU, where they compete with it."""
GPU_INTERVAL_S = 30.0
MEMORY_SHARE = 0.5
"""Of the host's free memory, the part that copies may take."""


class Keeper:
    """Decides after which steps the state is kept; all processes decide alike."""

    def __init__(
        self, places: Sequence[Path], settings: ResilienceConfig, state: TrainState, device: torch.device
    ) -> None:
        self._state, self._settings, self._device = state, settings, device
        self._interval = settings.snapshot_interval if settings.snapshot_interval >= 0 else 1
        self._chosen = settings.snapshot_interval >= 0
        self._waited_s = 0.0
        self._measured_from: tuple[int, float] | None = None
        wanted = bool(places) and self._interval > 0 and self._fits(len(places))
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._memory = None
        if self._all_agree(wanted):
            self._memory = StepMemory(places[:OWN_BUFFERS], places[OWN_BUFFERS:], neighbours)

    def due(self, clock: Clock) -> bool:
        """Whether the step just done is to be kept."""
        if self._memory is None:
            return False
        if not self._chosen:
            self._choose(clock)
        return self._interval > 0 and clock.step % self._interval == 0

    def keep(self, step: int, values: dict[str, Any]) -> None:
        """Begin to copy the state of this step."""
        assert self._memory is not None
        started = time.perf_counter()
        self._memory.keep(step, self._state.tensors(), values)
        self._waited_s += time.perf_counter() - started

    def before_update(self) -> None:
        """Weights are about to change: the copy must have them first."""
        if self._memory is not None:
            started = time.perf_counter()
            self._memory.before_update()
            self._waited_s += time.perf_counter() - started

    @property
    def active(self) -> bool:
        """Whether states are kept at all."""
        return self._memory is not None

    def newest(self, before: int | None = None) -> int | None:
        """The newest step in memory, or the newest before some step; the same on every process."""
        return None if self._memory is None else self._memory.newest(self._state.tensors(), before)

    def restore(self, step: int) -> dict[str, Any]:
        """Take the state of that step over; returns the values that were kept with it."""
        assert self._memory is not None
        tensors = self._state.tensors()
        values = self._memory.load(step, tensors)
        self._state.adopt(values["numbers"], tensors)
        return values

    def close(self) -> None:
        """Let go of the memory; what is in it stays."""
        if self._memory is not None:
            self._memory.close()

    def _choose(self, clock: Clock) -> None:
        """Once a few steps are measured: as often as costs next to nothing."""
        if self._measured_from is None:
            self._measured_from = (clock.step, time.perf_counter())
            self._waited_s = 0.0
        first, began = self._measured_from
        if clock.step - first < MEASURED_STEPS:
            return
        step_s = (time.perf_counter() - began) / MEASURED_STEPS
        slowest = torch.tensor([step_s, self._waited_s / MEASURED_STEPS])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        step_s, waited_s = slowest.tolist()
        by_cost = math.ceil(waited_s / (MOST_OVERHEAD * step_s))
        by_time = math.ceil(GPU_INTERVAL_S / step_s) if self._device.type == "cuda" else 1
        self._interval, self._chosen = max(1, by_cost, by_time), True

    def _fits(self, copies: int) -> bool:
        """Whether the host has room for the copies of all its processes."""
        if self._settings.snapshot_interval > 0:
            return True
        size_bytes = sum(
            tensor.nbytes
            for part in (self._state.weights(), *self._state.optimizers.state().values())
            for tensor in map(_local, part.values())
        )
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return size_bytes * copies * neighbours < MEMORY_SHARE * _available_bytes()

    def _all_agree(self, wanted: bool) -> bool:
        answer = torch.tensor(float(wanted))
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
