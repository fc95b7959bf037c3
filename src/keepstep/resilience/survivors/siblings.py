"""The processes of one replica, which shard its weights (HSDP). They live and die together.

Each of them has its own connection to the coordinator, and sums and copies with the processes of its rank in other
replicas. The coordinator sends all of them the same messages in the same order, but they read them at different times.
So what one of them notices counts for all of them, and they act on it at the same point of the program.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Siblings:
    """This process among those of its replica. The methods are collective, over the default process group."""

    rank: int = 0
    size: int = 1
    name: str = ""
    """Differs between a replica and the one that replaces it."""

    def any(self, own: bool) -> bool:
        """Whether it is so for any of them."""
        return bool(self.largest(int(own)))

    def largest(self, own: int) -> int:
        """The largest number of all."""
        return self._reduce(own, "MAX")

    def sum(self, own: int) -> int:
        """The sum over all."""
        return self._reduce(own, "SUM")

    def _reduce(self, own: int, operation: str) -> int:
        if self.size == 1:
            return own
        # Not for the agent, which imports this module too.
        import torch
        import torch.distributed as dist

        number = torch.tensor(own)
        dist.all_reduce(number, getattr(dist.ReduceOp, operation))
        return int(number)
