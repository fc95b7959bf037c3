"""The processes of one job as a checkpoint sees them: small CPU messages over a process group of their own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from keepstep.core.proc import available_cores
from keepstep.core.ranks import from_environment


class ProcessGroupInfo:
    """Rank, world size and small object collectives; a world of one when there is no process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                # A separate group, so that small messages never queue behind the collectives of training.
                self.group = dist.new_group(backend="gloo")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, on every rank."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def threads(self, share: int) -> int:
        """Hashing threads: 1/`share` of this rank's cores, at most 16 (more gain nothing)."""
        ranks = from_environment()
        neighbours = ranks.local_world_size if ranks.launched else self.world_size
        return min(16, max(1, available_cores() // neighbours // share))
