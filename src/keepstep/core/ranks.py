"""Which process am I? Facts from the environment that torchrun and its kin set; no torch needed."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all of them."""
        return self.rank == 0

    @property
    def launched(self) -> bool:
        """Whether a launcher started us (and with it set the rendezvous variables)."""
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def from_environment() -> Ranks:
    """Read torchrun's variables; without them this is the only process."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    return Ranks(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
    )
