"""Heartbeats: each process records its progress in memory that its node's agent reads.

With every heartbeat a process states how long it may stay silent. A step may take ten seconds, or three times as long
as slow steps took so far, whichever is more. Building, compiling and saving have a longer limit.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.config.schema import ResilienceConfig
from keepstep.core.units import format_seconds

_FIELDS = 6
_AT, _LIMIT, _STEP, _COUNT, _ACTIVITY, _STOP_S = range(_FIELDS)
Activity = Literal["start", "step", "data", "other"]
"""What a process does: it builds the run, computes a step, waits for data, or saves or evaluates."""
_ACTIVITIES: tuple[Activity, ...] = ("start", "step", "data", "other")
_SLOT_BYTES = 8 * _FIELDS
SLOW_STEP_FACTOR = 3.0
REMEMBERED_STEPS = 500


class HeartbeatTable:
    """The agent's side: one slot per process of the node, in memory that belongs to the agent."""

    def __init__(self, slots: int) -> None:
        self._fd = os.memfd_create("keepstep-heartbeat")
        os.ftruncate(self._fd, slots * _SLOT_BYTES)
        self._memory = mmap.mmap(self._fd, slots * _SLOT_BYTES)
        self._slots = slots
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        """The file that the processes of the node open."""

    def clear(self, limit_s: float) -> None:
        """Reset all slots before new processes start; they may be silent for `limit_s`."""
        for slot in range(self._slots):
            self.clear_slot(slot, limit_s)

    def clear_slot(self, slot: int, limit_s: float) -> None:
        """Reset one slot before a new process starts."""
        _slot(self._memory, slot)[:] = _first_heartbeat(limit_s)

    def read(self, slot: int) -> HeartbeatRecord:
        """The newest heartbeat of a process."""
        return _read(_slot(self._memory, slot))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self._fd)


@dataclass(frozen=True)
class HeartbeatRecord:
    """The newest heartbeat of one process."""

    age_s: float
    limit_s: float
    step: int
    """Newest finished step; -1 before the first."""
    count: int
    """Heartbeats so far."""
    activity: Activity = "start"
    stop_s: float = 0.0
    """Seconds after this heartbeat until a stop request takes effect, as far as that is known; else 0."""

    @property
    def waits_for_data(self) -> bool:
        """Whether it waits for data, so that the other processes wait for it."""
        return self.activity == "data"

    def stop_notice(self, number: int) -> str:
        """The answer to the stop signal `number`: what happens next, and when."""
        left_s = self.stop_s - self.age_s
        step = f"step {max(self.step, 0) + 1}" + (f", about {format_seconds(left_s)}" if left_s >= 1 else "")
        doing = {
            "start": "stopping before the first step",
            "step": f"finishing {step}, then saving",
            "data": "waiting for data no longer, saving",
            "other": "finishing a save or an evaluation, then stopping",
        }
        again = "; Ctrl-C again to stop without saving" if number == signal.SIGINT else ""
        return f"{signal.Signals(number).name}: {doing[self.activity]}{again}"

    @property
    def overdue(self) -> bool:
        """Whether it has been silent for longer than it may."""
        return self.age_s > self.limit_s


class Heartbeat:
    """The process's side. Without an agent only the process itself reads it."""

    def __init__(self, path: Path | None, slot: int, settings: ResilienceConfig) -> None:
        self._settings = settings
        self._fields = memoryview(bytearray(_first_heartbeat(settings.start_timeout_s))).cast("d")
        self._step_times_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._stepped_at: float | None = None
        self._stop_s = 0.0
        if path is not None:
            with path.open("r+b") as file:
                self._fields = _slot(mmap.mmap(file.fileno(), 0), slot)

    @property
    def newest(self) -> HeartbeatRecord:
        """The newest heartbeat."""
        return _read(self._fields)

    def expect_stop_within(self, seconds: float) -> None:
        """State how long a stop request takes to have effect from the next heartbeat on."""
        self._stop_s = seconds

    def start_steps(self) -> None:
        """Report that steps begin, or continue after something else."""
        self._record("step", self._settings.start_timeout_s)

    def stepped(self, step: int) -> None:
        """Report a finished step; the next one is due within the limit for steps."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._step_times_s.append(now - self._stepped_at)
        self._stepped_at = now
        self._record("step", self.limit_s, step)

    def busy(self) -> None:
        """Report that something other than a step runs: building, evaluating, saving."""
        self._stepped_at = None
        self._record("other", self._settings.start_timeout_s)

    def waiting(self) -> None:
        """Report that the data of the next step has not arrived. Repeat this: each call is a heartbeat."""
        self._stepped_at = None
        self._record("data", self.limit_s)

    @property
    def limit_s(self) -> float:
        """How long a step may take before it counts as a hang."""
        # The first steps compile kernels and open files: their times say nothing about later ones.
        if len(self._step_times_s) < 2:
            return self._settings.start_timeout_s
        slowest = sorted(self._step_times_s)[math.ceil(0.99 * len(self._step_times_s)) - 1]
        return max(self._settings.hang_s, SLOW_STEP_FACTOR * slowest)

    def _record(self, activity: Activity, limit_s: float, step: int | None = None) -> None:
        self._fields[_ACTIVITY] = float(_ACTIVITIES.index(activity))
        self._fields[_STOP_S] = self._stop_s
        # Write the limit first: a longer one must be in place before the time that it is measured from.
        self._fields[_LIMIT] = limit_s
        self._fields[_AT] = time.monotonic()
        if step is not None:
            self._fields[_STEP] = float(step)
        self._fields[_COUNT] += 1.0


def _first_heartbeat(limit_s: float) -> array[float]:
    """Before a process has reported anything."""
    return array("d", [time.monotonic(), limit_s, -1.0, 0.0, 0.0, 0.0])


def _slot(memory: mmap.mmap, slot: int) -> memoryview[float]:
    return memoryview(memory)[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES].cast("d")


def _read(fields: memoryview[float]) -> HeartbeatRecord:
    at, limit_s, step, count, activity, stop_s = fields
    return HeartbeatRecord(time.monotonic() - at, limit_s, int(step), int(count), _ACTIVITIES[int(activity)], stop_s)
