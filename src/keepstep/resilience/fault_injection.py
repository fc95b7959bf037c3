"""Injected faults: which fault, in which process, after which step. Read from the environment, polled by the loop.

`keepstep chaos` sets the variables; without them nothing here has an effect. A fault happens once per experiment, even
if the run repeats its step: the first process that reaches it creates a mark file in the experiment's folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAULTS = "KEEPSTEP_CHAOS"
"""Environment variable: the faults of an experiment as JSON."""
FOLDER = "KEEPSTEP_CHAOS_FOLDER"
"""Environment variable: the folder for mark files."""
ALL_RANKS = -1
CLOCK_JUMP_S = -3600.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 5.0
"""Of a fault that waits for a file: each wait is twice as long as the one before. No wait may look like a hang."""


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` happens in the process `rank` (-1: in all) after `step`."""

    kind: str
    step: int
    rank: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique among the faults of an experiment."""
        return f"{self.kind}-{self.step}-{self.rank}"


def to_environment(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """The variables that inject these faults into a run."""
    return {FAULTS: json.dumps([asdict(fault) for fault in faults]), FOLDER: str(folder)}


def happened_at(fault: Fault, folder: Path) -> float | None:
    """When a fault was injected, in unix time; None if it has not been yet."""
    try:
        return float((folder / f"{fault.name}.mark").read_text())
    except (OSError, ValueError):
        return None


class FaultInjector:
    """The faults that are to be injected into one process."""

    def __init__(self, faults: Sequence[Fault], folder: Path, rank: int) -> None:
        self._faults = [fault for fault in faults if fault.rank in (rank, ALL_RANKS)]
        self._folder, self._rank = folder, rank
        self._slow_until = 0
        self._slow_s = 0.0
        self._balloon: tuple[Path, int] | None = None
        self._wait_s = FIRST_WAIT_S

    @classmethod
    def from_environment(cls, rank: int) -> FaultInjector | None:
        """The faults that the environment asks for; None if it asks for none."""
        text = os.environ.get(FAULTS)
        if not text:
            return None
        return cls([Fault(**fault) for fault in json.loads(text)], Path(os.environ[FOLDER]), rank)

    def poisoned(self, step: int) -> bool:
        """Whether the gradients of the next step are to become NaN."""
        return any(fault.kind == "nan" and fault.step == step and self._first(fault) for fault in self._faults)

    def after_step(self, step: int) -> None:
        """Inject what is due after this step."""
        if step < self._slow_until:
            time.sleep(self._slow_s)
        if self._balloon is not None and step >= self._balloon[1]:
            self._balloon[0].unlink(missing_ok=True)
            self._balloon = None
        for fault in self._faults:
            if fault.kind == "wait" and step > fault.step:
                self._wait(fault)
            elif fault.step == step and fault.kind not in ("nan", "wait") and self._first(fault):
                self._inject(fault)

    def _first(self, fault: Fault) -> bool:
        mark = self._folder / f"{fault.name}.mark"
        # A fault of all processes needs one mark per process, or only the first would have it.
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

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                # Together with its helpers, as the out-of-memory killer or a lost node would.
                os.killpg(os.getpgrp(), signal.SIGKILL)
            case "kill_launcher":
                os.kill(_agent(), signal.SIGKILL)
            case "terminate":
                os.kill(_agent(), signal.SIGTERM)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception":
                raise RuntimeError(f"injected fault: exception after step {fault.step}")
            case "oom":
                raise MemoryError(f"injected fault: out of memory after step {fault.step}")
            case "slow":
                self._slow_until = fault.step + int(fault.facts["steps"])
                self._slow_s = float(fault.facts["seconds"])
            case "clock":
                real = time.time
                time.time = lambda: real() + CLOCK_JUMP_S
            case "full":
                self._fill(fault)

    def _wait(self, fault: Fault) -> None:
        """After each further step, also in a process that was started again: the run does not end before its time."""
        file, longest_s = Path(fault.facts["file"]), fault.facts.get("longest_s", LONGEST_WAIT_S)
        deadline = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, longest_s)
        while time.monotonic() < deadline and not file.exists():
            time.sleep(0.02)

    def _fill(self, fault: Fault) -> None:
        """Fill the file system of a folder completely, for some steps."""
        balloon = Path(fault.facts["folder"]) / ".balloon"
        if not balloon.parent.is_mount():
            # Never the machine's own disk.
            raise RuntimeError(f"chaos: {balloon.parent} is not a file system of its own, and is not filled")
        try:
            with balloon.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            self._balloon = (balloon, fault.step + int(fault.facts["steps"]))


def _agent() -> int:
    agent = multiprocessing.parent_process()
    if agent is None or agent.pid is None:
        raise RuntimeError("this process has no agent into which a fault could be injected")
    return agent.pid
