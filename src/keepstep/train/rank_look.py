"""Every so many steps, a look at all ranks: how long each took, waited for data, and how much memory it held.

Gathered over the host's own network group while the device works on; nobody waits for it: it is read at the next look.
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
class _Under:
    """A look under way."""

    step: int
    rows: list[torch.Tensor]
    work: Any


class RankLook:
    """All ranks call `take` for the same steps, in the same order."""

    def __init__(self, interval_steps: int, ranks: int) -> None:
        self._interval = interval_steps
        self._ranks = ranks
        self._hosts: list[str] = [""] * ranks
        self._under: _Under | None = None
        self._wait_s = 0.0
        if interval_steps:
            dist.all_gather_object(self._hosts, socket.gethostname())

    def meet(self, step: int) -> None:
        """Before the step `step`, on every rank: where a look is due, see how long this one waits for the others."""
        if not self._interval or step % self._interval or self._ranks == 1:
            return
        started = time.perf_counter()
        dist.all_reduce(torch.zeros(1))
        self._wait_s = time.perf_counter() - started

    def take(self, step: int, step_s: float, data_s: float, memory_gib: float) -> dict[str, Any] | None:
        """Start a look when one is due; the one before it, where it is complete."""
        if not self._interval or step % self._interval:
            return None
        done = self._finish()
        mine = torch.tensor([step_s, data_s, memory_gib, self._wait_s], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._under = _Under(step, rows, dist.all_gather(rows, mine, async_op=True))
        return done

    def _finish(self) -> dict[str, Any] | None:
        if self._under is None:
            return None
        under, self._under = self._under, None
        under.work.wait()
        columns = torch.stack(under.rows).T.tolist()
        return {"step": under.step, "host": self._hosts, **dict(zip(FIELDS, columns, strict=True))}
