"""Every so many steps, statistics of all ranks: step time, data wait, memory, and wait for the other ranks.

Gathered over the host network while the device computes. Nobody waits for the result: it is read at the next interval.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FIELDS = ("step_s", "data_s", "memory_gib", "wait_s")


@dataclass
class _Pending:
    """Statistics that are being gathered."""

    step: int
    rows: list[torch.Tensor]
    work: Any


class RankStats:
    """All ranks call `gather` for the same steps, in the same order."""

    def __init__(self, interval_steps: int, ranks: int) -> None:
        self._interval = interval_steps
        self._ranks = ranks
        self._hosts: list[str] = [""] * ranks
        self._pending: _Pending | None = None
        self._wait_s = 0.0
        if interval_steps:
            dist.all_gather_object(self._hosts, socket.gethostname())

    def measure_wait(self, step: int) -> None:
        """Before step `step`, on every rank: measure how long this rank waits for the others, where it is due."""
        if not self._interval or step % self._interval or self._ranks == 1:
            return
        started = time.perf_counter()
        dist.all_reduce(torch.zeros(1))
        self._wait_s = time.perf_counter() - started

    def gather(self, step: int, step_s: float, data_s: float, memory_gib: float) -> dict[str, Any] | None:
        """Start to gather where it is due; returns the statistics gathered before."""
        if not self._interval or step % self._interval:
            return None
        done = self._finish()
        mine = torch.tensor([step_s, data_s, memory_gib, self._wait_s], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending = _Pending(step, rows, dist.all_gather(rows, mine, async_op=True))
        return done

    def _finish(self) -> dict[str, Any] | None:
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        pending.work.wait()
        columns = torch.stack(pending.rows).T.tolist()
        return {"step": pending.step, "host": self._hosts, **dict(zip(FIELDS, columns, strict=True))}
