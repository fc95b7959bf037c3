"""Rollback: return a run to its last good state, and skip the samples that spoiled it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepstep.checkpoint.protocol.layout import local_tensors
from keepstep.config.schema import GuardConfig
from keepstep.data.step_feed import StepFeed
from keepstep.resilience.guard import Reading
from keepstep.train.recovery.skipped_samples import SkippedSamples
from keepstep.train.recovery.snapshot_policy import SnapshotPolicy
from keepstep.train.state import TrainState

COPIES = 2
"""The newest copy may be that of the very step that proves bad; the one before it is then the last good state."""


class Rollback:
    """Goes back to a snapshot in the agent's memory, or to a copy of its own where there are no snapshots."""

    def __init__(
        self,
        state: TrainState,
        snapshots: SnapshotPolicy,
        feed: StepFeed,
        skipped: SkippedSamples,
        guard: GuardConfig,
    ) -> None:
        self._state, self._snapshots = state, snapshots
        self._feed, self._skipped = feed, skipped
        wants_copies = guard.rolls_back and not snapshots.active
        self._copies = StateCopies(state, guard.keep_interval) if wants_copies else None

    def copy_if_due(self, step: int) -> None:
        """Copy the state after `step`, where copies are due and nothing else holds one."""
        if self._copies is not None:
            self._copies.copy_if_due(step)

    def to_before(self, reading: Reading, *, skip_samples: bool) -> bool:
        """Return to the last good state before a bad step; False where there is none.

        With `skip_samples` the run never uses the samples of this step again.
        """
        snapshot = self._snapshots.newest(before=reading.step) if self._snapshots.active else None
        if self._copies is None and snapshot is None:
            return False
        if skip_samples:
            # On disk first: a crash during the rollback must not bring the samples back.
            self._skipped.add(reading.first_sample, reading.count, reading.step)
        elapsed_s = self._state.clock.elapsed_s
        if self._copies is not None:
            self._copies.restore(before=reading.step)
        elif snapshot is not None:
            self._snapshots.restore(snapshot)
        # The time was spent all the same.
        self._state.clock.elapsed_s = elapsed_s
        self._feed.rewind(self._state.clock.samples, self._skipped.ranges)
        return True


@dataclass(frozen=True)
class _Copy:
    step: int
    numbers: dict[str, Any]
    tensors: list[Tensor]


class StateCopies:
    """Copies of the training state in host memory, allocated once and reused in turn."""

    def __init__(self, state: TrainState, every: int) -> None:
        self._state = state
        self._every = every
        self._copies: list[_Copy] = []

    def copy_if_due(self, step: int) -> None:
        """Copy the state after `step`, where the interval has passed."""
        if self._copies and step < self._copies[-1].step + self._every:
            return
        live = local_tensors(self._state.tensors())
        buffers = self._copies.pop(0).tensors if len(self._copies) == COPIES else [_host_buffer(each) for each in live]
        for buffer, tensor in zip(buffers, live, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self._copies.append(_Copy(step, self._state.numbers(), buffers))

    def restore(self, before: int) -> int:
        """Return to the newest copy before step `before` and drop later ones; returns its step."""
        self._copies = [copy for copy in self._copies if copy.step < before]
        newest = self._copies[-1]
        into = self._state.tensors()
        with torch.no_grad():
            for tensor, buffer in zip(local_tensors(into), newest.tensors, strict=True):
                tensor.copy_(buffer)
        self._state.adopt(newest.numbers, into)
        return newest.step


def _host_buffer(tensor: Tensor) -> Tensor:
    """Host memory for a copy; pinned, so that a GPU copies behind its work."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
