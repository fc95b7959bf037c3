"""When the state is copied into the agent's memory, which survives the worker processes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots, newest_snapshot
from keepstep.checkpoint.protocol.layout import local_tensors
from keepstep.config.schema import ResilienceConfig
from keepstep.core.proc import available_memory_bytes
from keepstep.train.clock import Clock
from keepstep.train.state import TrainState

OWN_BUFFERS = 2
"""Of the buffers that an agent gives a process; the others hold the snapshots of another node."""
MEASURED_STEPS = 4
"""Steps after which the interval is chosen, from the times of copies and steps so far."""
MOST_OVERHEAD = 0.05
"""Share of a step that snapshots may cost on a CPU, where they compete with it."""
GPU_INTERVAL_S = 30.0
MEMORY_SHARE = 0.5
"""Share of the host's free memory that snapshots may take."""


class SnapshotPolicy:
    """Decides after which steps to take a snapshot; all processes decide alike."""

    def __init__(
        self,
        places: Sequence[Path],
        settings: ResilienceConfig,
        state: TrainState,
        device: torch.device,
        metadata: Mapping[str, Any],
    ) -> None:
        """`places` are the agent's buffers, `metadata` is what the run's checkpoints say about it."""
        self._places, self._settings, self._metadata = places, settings, metadata
        self._state, self._device = state, device
        self._interval = settings.snapshot_interval if settings.snapshot_interval >= 0 else 1
        self._chosen = settings.snapshot_interval >= 0
        self._waited_s = 0.0
        self._taken = -1
        self._measured_from: tuple[int, float] | None = None
        self._takes = self._all_agree(self._interval > 0 and self._fits())
        # Even without room for new snapshots, those of the processes before are the newest state.
        none_held = self._all_agree(newest_snapshot(places) < 0)
        self._memory = None if none_held and not self._takes else self._open()

    def _open(self) -> InMemorySnapshots:
        own, mirrored = self._places[:OWN_BUFFERS], self._places[OWN_BUFFERS:]
        return InMemorySnapshots(own, mirrored, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), self._metadata)

    def due(self, clock: Clock, last: bool) -> bool:
        """Whether to take a snapshot of the step just done; the last one before a stop always gets one."""
        if not self._takes:
            return False
        if last:
            return clock.step != self._taken
        if not self._chosen:
            self._choose(clock)
        return self._interval > 0 and clock.step % self._interval == 0

    def take(self, step: int, values: dict[str, Any], loss: float | None) -> None:
        """Start to copy the state of this step."""
        assert self._memory is not None
        started = time.perf_counter()
        self._taken = step
        self._memory.save(step, self._state.tensors(), values, {"loss": loss})
        self._waited_s += time.perf_counter() - started

    def take_now(self, step: int, values: dict[str, Any], loss: float | None) -> bool:
        """Copy the state of this step, which is not on disk, even where no snapshots are taken otherwise.

        False where there is no memory for it. Collective.
        """
        if not self._takes and not self._all_agree(self._fits()):
            return False
        self._memory = self._memory or self._open()
        self.take(step, values, loss)
        self._memory.join()
        return True

    def before_update(self) -> None:
        """Weights are about to change: the copy must have them first."""
        if self._memory is not None:
            started = time.perf_counter()
            self._memory.before_update()
            self._waited_s += time.perf_counter() - started

    @property
    def active(self) -> bool:
        """Whether snapshots are taken at all."""
        return self._takes

    def newest(self, before: int | None = None) -> int | None:
        """The newest step in memory, or the newest before some step; the same on every process."""
        return None if self._memory is None else self._memory.newest(self._state.tensors(), before)

    def restore(self, step: int) -> dict[str, Any]:
        """Load the snapshot of that step; returns its plain values."""
        assert self._memory is not None
        tensors = self._state.tensors()
        values = self._memory.load(step, tensors)
        self._state.adopt(values["numbers"], tensors)
        return values

    def close(self) -> None:
        """Release the memory; the agent keeps what is in it."""
        if self._memory is not None:
            self._memory.close()

    def _choose(self, clock: Clock) -> None:
        """Choose the interval once a few steps are measured: as often as is nearly free."""
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

    def _fits(self) -> bool:
        """Whether there is an agent with memory, and room in it for the snapshots of all its processes."""
        if not self._places:
            return False
        if self._settings.snapshot_interval > 0:
            return True
        size_bytes = sum(tensor.nbytes for tensor in local_tensors(self._state.tensors()))
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        buffers = len(self._places) if dist.get_world_size() > neighbours else OWN_BUFFERS
        # What the snapshots of the processes before take becomes free when they are overwritten.
        held_bytes = sum(place.stat().st_size for place in self._places)
        return (size_bytes * buffers - held_bytes) * neighbours < MEMORY_SHARE * available_memory_bytes()

    def _all_agree(self, wanted: bool) -> bool:
        answer = torch.tensor(float(wanted))
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer)
