"""Numbers of finished steps, read one step late so that the read never stalls the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Mark:
    """A point on the device's timeline (the host's, where the host is the device)."""

    event: torch.cuda.Event | None
    host_s: float

    @classmethod
    def now(cls, device: torch.device) -> _Mark:
        if device.type != "cuda":
            return cls(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event, 0.0)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_until(self, later: _Mark) -> float:
        if self.event is None or later.event is None:
            return later.host_s - self.host_s
        return float(self.event.elapsed_time(later.event)) / 1000


class AsyncMetrics:
    """A queue of steps in flight: push what the device will compute, pop it once it has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: list[tuple[Tensor, _Mark]] = []
        self._previous = _Mark.now(device)

    def push(self, values: Tensor) -> None:
        """Start copying a step's numbers to the host."""
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        self._in_flight.append((values, _Mark.now(self._device)))

    def pop(self) -> tuple[list[float], float]:
        """The oldest step's numbers and its seconds, waiting for that step alone."""
        values, done = self._in_flight.pop(0)
        done.wait()
        step_s = self._previous.seconds_until(done)
        self._previous = done
        numbers: list[float] = values.tolist()
        return numbers, step_s

    def restart(self) -> None:
        """Something other than a step took time: measure the next step from here."""
        self._previous = _Mark.now(self._device)

    def __len__(self) -> int:
        return len(self._in_flight)
