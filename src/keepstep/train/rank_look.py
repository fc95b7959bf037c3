"""Every so many steps, a look at all ranks: how long each took, waited for data, and how much memory it held.

Gathered over the host's own network group while the device works on; nobody waits for it: it is read at the next look.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FIELDS = ("step_s", "data_s", "memory_gib")


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
        if interval_steps:
            dist.all_gather_object(self._hosts, socket.gethostname())

    def take(self, step: int, step_s: float, data_s: float, memory_gib: float) -> dict[str, Any] | None:
        """Start a look when one is due; the one before it, where it is complete."""
        if not self._interval or step % self._interval:
            return None
        done = self._finish()
        mine = torch.tensor([step_s, data_s, memory_gib], dtype=torch.float64)
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
