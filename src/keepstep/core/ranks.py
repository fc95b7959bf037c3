"""Which process am I? Facts from the environment that torchrun and its kin set; no torch needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STORE_FILE = "KEEPSTEP_STORE_FILE"
"""Environment variable: the file in which the processes of a node that is alone find each other."""
PULSE_FILE = "KEEPSTEP_PULSE_FILE"
"""Environment variable: where a process marks its progress for its node's agent."""
MEMORY_FILES = "KEEPSTEP_MEMORY_FILES"
"""Environment variable: memory of the agent that keeps a process's newest state when the process dies."""
LAUNCH = "KEEPSTEP_LAUNCH"
"""Environment variable: names the agent that started a process, and stays the same when that starts it again."""


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0
    launch: str = ""
    """Names the launcher that started this process, and starts it again when something breaks."""
    store_file: str = ""
    pulse_file: Path | None = None
    memory_files: tuple[Path, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all of them."""
        return self.rank == 0

    @property
    def supervised(self) -> bool:
        """Whether an agent of ours watches this process and starts it again."""
        return self.pulse_file is not None

    @property
    def launched(self) -> bool:
        """Whether a launcher started us (and with it set the rendezvous variables)."""
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def from_environment() -> Ranks:
    """Read torchrun's variables; without them this is the only process."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    pulse = os.environ.get(PULSE_FILE)
    memory = os.environ.get(MEMORY_FILES, "")
    return Ranks(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
        launch=os.environ.get(LAUNCH) or os.environ.get("TORCHELASTIC_RUN_ID", ""),
        store_file=os.environ.get(STORE_FILE, ""),
        pulse_file=Path(pulse) if pulse else None,
        memory_files=tuple(Path(path) for path in memory.split(os.pathsep) if path),
    )
