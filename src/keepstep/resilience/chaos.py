"""Faults on purpose: which one, in which process, after which step. Read from the environment, polled by the loop.

`keepstep chaos` sets the variables; nothing here does anything without them. A fault happens once in a rehearsal,
however often the run comes past its step again: the first process to reach it leaves a mark in the rehearsal's folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAULTS = "KEEPSTEP_CHAOS"
"""Environment variable: the faults of a rehearsal as JSON."""
FOLDER = "KEEPSTEP_CHAOS_FOLDER"
"""Environment variable: where marks are left."""
ALL_RANKS = -1
CLOCK_JUMP_S = -3600.0


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` happens in the process `rank` (-1: in all) after `step`."""

    kind: str
    step: int
    rank: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Tells the faults of a rehearsal apart."""
        return f"{self.kind}-{self.step}-{self.rank}"


def to_environment(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """The variables that make a run suffer these faults."""
    return {FAULTS: json.dumps([asdict(fault) for fault in faults]), FOLDER: str(folder)}


def happened_at(fault: Fault, folder: Path) -> float | None:
    """When a fault struck, in unix time; None while it has not."""
    try:
        return float((folder / f"{fault.name}.mark").read_text())
    except (OSError, ValueError):
        return None


class Chaos:
    """The faults that wait for one process."""

    def __init__(self, faults: Sequence[Fault], folder: Path, rank: int) -> None:
        self._faults = [fault for fault in faults if fault.rank in (rank, ALL_RANKS)]
        self._folder, self._rank = folder, rank
        self._slow_until = 0
        self._slow_s = 0.0
        self._balloon: tuple[Path, int] | None = None

    @classmethod
    def from_environment(cls, rank: int) -> Chaos | None:
        """What the environment asks for; None where it asks for nothing."""
        text = os.environ.get(FAULTS)
        if not text:
            return None
        return cls([Fault(**fault) for fault in json.loads(text)], Path(os.environ[FOLDER]), rank)

    def poisoned(self, step: int) -> bool:
        """Whether a gradient of the step about to run becomes NaN."""
        return any(fault.kind == "nan" and fault.step == step and self._first(fault) for fault in self._faults)

    def after_step(self, step: int) -> None:
        """Let happen what is due."""
        if step < self._slow_until:
            time.sleep(self._slow_s)
        if self._balloon is not None and step >= self._balloon[1]:
            self._balloon[0].unlink(missing_ok=True)
            self._balloon = None
        for fault in self._faults:
            if fault.step == step and fault.kind in _ACTIONS and self._first(fault):
                _ACTIONS[fault.kind](self, fault)

    def _first(self, fault: Fault) -> bool:
        mark = self._folder / f"{fault.name}.mark"
        # Faults of all processes need a mark each, or only the first of them would suffer.
        if fault.rank == ALL_RANKS:
            mark = mark.with_name(f"{fault.name}.{self._rank}.mark")
        try:
            with mark.open("x") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            return False
        if fault.rank == ALL_RANKS and self._rank == 0:
            mark.with_name(f"{fault.name}.mark").write_text(repr(time.time()))
        return True

    def _kill(self, fault: Fault) -> None:  # noqa: ARG002
        # With the helpers this process started, as an out-of-memory killer or a lost node would.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def _kill_launcher(self, fault: Fault) -> None:  # noqa: ARG002
        os.kill(_agent(), signal.SIGKILL)

    def _terminate(self, fault: Fault) -> None:  # noqa: ARG002
        os.kill(_agent(), signal.SIGTERM)

    def _stop(self, fault: Fault) -> None:  # noqa: ARG002
        os.kill(os.getpid(), signal.SIGSTOP)

    def _raise(self, fault: Fault) -> None:
        raise RuntimeError(f"rehearsed: a bug strikes after step {fault.step}")

    def _out_of_memory(self, fault: Fault) -> None:
        raise MemoryError(f"rehearsed: no memory after step {fault.step}")

    def _slow(self, fault: Fault) -> None:
        self._slow_until = fault.step + int(fault.facts["steps"])
        self._slow_s = float(fault.facts["seconds"])

    def _jump(self, fault: Fault) -> None:  # noqa: ARG002
        real = time.time
        time.time = lambda: real() + CLOCK_JUMP_S

    def _fill(self, fault: Fault) -> None:
        """Fill the file system of a folder to the last byte, for some steps."""
        balloon = Path(fault.facts["folder"]) / ".balloon"
        try:
            with balloon.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            self._balloon = (balloon, fault.step + int(fault.facts["steps"]))


_ACTIONS: Mapping[str, Callable[[Chaos, Fault], None]] = {
    "kill": Chaos._kill,
    "kill_launcher": Chaos._kill_launcher,
    "terminate": Chaos._terminate,
    "stop": Chaos._stop,
    "exception": Chaos._raise,
    "oom": Chaos._out_of_memory,
    "slow": Chaos._slow,
    "clock": Chaos._jump,
    "full": Chaos._fill,
}


def _agent() -> int:
    agent = multiprocessing.parent_process()
    if agent is None or agent.pid is None:
        raise RuntimeError("this process has no agent that a rehearsal could strike")
    return agent.pid
