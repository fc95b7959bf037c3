"""Who hangs, and in what: a look at the node's processes before they are ended."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.resilience.pulse import Beat
from keepstep.resilience.workers import STACKS_SIGNAL, Workers

STACKS_WAIT_S = 0.5
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a device or a file system"}
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+ in (?P<name>\S+)')


@dataclass(frozen=True)
class Look:
    """What could be seen of one process."""

    local_rank: int
    state: str
    """One letter from the operating system: R, S, D, T."""
    collective: str
    """The exchange with other processes it waits in, if it does."""
    stack: str

    def describe(self) -> str:
        """In a few words."""
        if self.state in _STATES:
            return _STATES[self.state]
        if self.collective:
            return f"waiting in {self.collective}"
        innermost = _FRAME.search(self.stack)
        return f"in {innermost['name']} ({Path(innermost['file']).name})" if innermost else "silent"


def look_at(workers: Workers, stack_files: Sequence[Path]) -> list[Look]:
    """Have every process write its stacks, and read what the operating system knows of it."""
    sizes = [file.stat().st_size if file.exists() else 0 for file in stack_files]
    workers.signal(STACKS_SIGNAL)
    time.sleep(STACKS_WAIT_S)
    looks = []
    for local_rank, (pid, file, size) in enumerate(zip(workers.pids, stack_files, sizes, strict=True)):
        stack = file.read_text(errors="replace")[size:] if file.exists() else ""
        looks.append(Look(local_rank, _state(pid), _collective(stack), stack))
    return looks


def most_suspect(looks: Sequence[Look], beats: Sequence[Beat]) -> Look:
    """A process the system holds still, else one that is not waiting for others, else the one that got least far."""
    held = [look for look in looks if look.state in _STATES]
    alone = [look for look in looks if look.stack and not look.collective]
    return (held or alone or sorted(looks, key=lambda look: beats[look.local_rank].marks))[0]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _collective(stack: str) -> str:
    """The innermost of torch's exchanges that any thread is in."""
    for frame in _FRAME.finditer(stack):
        if frame["file"].endswith("distributed_c10d.py") and frame["name"] != "wrapper":
            return frame["name"]
    return ""
