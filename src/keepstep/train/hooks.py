"""What the loop is given: the parts it drives, and the hooks it calls between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from keepstep.data.step_feed import StepFeed
from keepstep.resilience.fault_injection import FaultInjector
from keepstep.resilience.heartbeat import Heartbeat
from keepstep.resilience.signals import StopFlag
from keepstep.resilience.survivors.replica import Replica
from keepstep.train.clock import Clock
from keepstep.train.recovery.rollback import Rollback
from keepstep.train.state import TrainState
from keepstep.train.step import TrainStep
from keepstep.train.telemetry.profiler import Profiler
from keepstep.train.telemetry.recorder import Recorder


class LoopHooks(Protocol):
    """What the trainer does when the loop says that it is time."""

    def before_update(self) -> None:
        """Weights are about to change: copies under way must finish first."""

    def at_boundary(self, settle: Callable[[], bool]) -> None:
        """Before a step: let replicas join."""

    def rejoin(self) -> None:
        """A replica was lost in the middle of a step: form the new membership with the others."""

    def snapshot_due(self, last: bool = False) -> bool:
        """Whether the step just done, perhaps the last before a stop, goes into memory that survives this process."""

    def snapshot(self) -> None:
        """Copy the step just done into that memory."""

    def save(self) -> None:
        """Start to save the step just done, behind training."""

    def ensure_saved(self, at_least: int | None = None) -> None:
        """Return with the step just done, or any step from `at_least` on, committed and verified."""

    def evaluate(self) -> bool:
        """Evaluate the step just done; False where a stop request cut this short."""

    def check_corruption(self) -> None:
        """Let every process compute the same rows; raises where their bits differ."""

    def stop_early(self) -> bool:
        """Whether evaluations say that more training is of no use."""


@dataclass(frozen=True)
class LoopParts:
    """What the loop drives."""

    step: TrainStep
    feed: StepFeed
    state: TrainState
    recorder: Recorder
    profiler: Profiler
    heartbeat: Heartbeat
    rollback: Rollback
    stop: StopFlag
    faults: FaultInjector | None
    """Faults to inject on purpose."""
    replica: Replica | None = None
    """This process among replicas that outlive each other, if it is one."""
    joined: bool = False
    """Whether its state came from living replicas, which have evaluated it already."""
    saved_step: int = -1
    """The checkpoint that the run resumed from, or a newer one: no need to save that step again."""

    @property
    def clock(self) -> Clock:
        """Where the run is."""
        return self.state.clock
