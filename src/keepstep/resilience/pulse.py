"""Signs of life: each process marks its progress in memory that its node's agent reads.

A process says how long it may stay silent until its next mark. Steps may take ten seconds or three times what slow
steps took so far, whichever is more; building, compiling and saving have a longer limit of their own.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from keepstep.config.schema import ResilienceConfig

_FIELDS = 5
_AT, _LIMIT, _STEP, _MARKS, _WAITS = range(_FIELDS)
_ITEM_BYTES = 8
SLOW_STEP_FACTOR = 3.0
REMEMBERED_STEPS = 500


class Board:
    """The agent's side: a slot for each process of the node, in memory that belongs to the agent."""

    def __init__(self, slots: int) -> None:
        self._handle = os.memfd_create("keepstep-pulse")
        os.ftruncate(self._handle, slots * _FIELDS * _ITEM_BYTES)
        self._memory = mmap.mmap(self._handle, slots * _FIELDS * _ITEM_BYTES)
        self._slots = slots
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
        """Where the processes of the node find it."""

    def clear(self, limit_s: float) -> None:
        """New processes are about to start, and may be silent for `limit_s`."""
        for slot in range(self._slots):
            self._fields(slot)[:] = array("d", [time.monotonic(), limit_s, -1.0, 0.0, 0.0])

    def read(self, slot: int) -> Beat:
        """The newest mark of a process."""
        at, limit_s, step, marks, waits = self._fields(slot)
        return Beat(time.monotonic() - at, limit_s, int(step), int(marks), bool(waits))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self._handle)

    def _fields(self, slot: int) -> memoryview[float]:
        size = _FIELDS * _ITEM_BYTES
        return memoryview(self._memory)[slot * size : (slot + 1) * size].cast("d")


@dataclass(frozen=True)
class Beat:
    """What a process last said of itself."""

    age_s: float
    limit_s: float
    step: int
    """Newest finished step; -1 before the first."""
    marks: int
    waits: bool = False
    """Whether it is waiting for its data, and the others for it."""

    @property
    def overdue(self) -> bool:
        """Whether it has been silent for longer than it said."""
        return self.age_s > self.limit_s


class Pulse:
    """A process's side. Without an agent there is nobody to tell, and every call does nothing."""

    def __init__(self, path: Path | None, slot: int, settings: ResilienceConfig) -> None:
        self._settings = settings
        self._fields: memoryview[float] | None = None
        self._took_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._stepped_at: float | None = None
        if path is not None:
            size = _FIELDS * _ITEM_BYTES
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            self._fields = memoryview(memory)[slot * size : (slot + 1) * size].cast("d")

    def stepped(self, step: int) -> None:
        """A step is done; the next one is due within the limit for steps."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._took_s.append(now - self._stepped_at)
        self._stepped_at = now
        self._mark(self.limit_s, step)

    def busy(self) -> None:
        """Something other than a step begins, or goes on: building, evaluating, saving."""
        self._stepped_at = None
        self._mark(self._settings.start_timeout_s, None)

    def waiting(self) -> None:
        """The data of the next step is not here yet. To be said again and again: each time is a sign of life."""
        self._stepped_at = None
        self._mark(self.limit_s, None, waits=True)

    @property
    def limit_s(self) -> float:
        """How long a step may take before it counts as hanging."""
        # The first steps compile kernels and open files: nothing can be told from them.
        if len(self._took_s) < 2:
            return self._settings.start_timeout_s
        slowest = sorted(self._took_s)[math.ceil(0.99 * len(self._took_s)) - 1]
        return max(self._settings.hang_s, SLOW_STEP_FACTOR * slowest)

    def _mark(self, limit_s: float, step: int | None, *, waits: bool = False) -> None:
        if self._fields is None:
            return
        self._fields[_WAITS] = float(waits)
        # The limit goes first: a longer one must be there before the time it is measured from.
        self._fields[_LIMIT] = limit_s
        self._fields[_AT] = time.monotonic()
        if step is not None:
            self._fields[_STEP] = float(step)
        self._fields[_MARKS] += 1.0
