"""A rehearsal: play a fault on the user's own run, let the run recover, and compare it with one that nothing befell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.errors import EXIT_STOPPED, PreflightError
from keepstep.observe.folder import JsonLines, Record, RunFolder, number, split_kinds
from keepstep.observe.verdict import find_straggler
from keepstep.resilience.chaos import Fault, happened_at, to_environment

MOST_STARTS = 5
"""Times a person, or a scheduler, would start a stopped run again before looking into it."""
ORPHANS_S = 60.0
_SIGNS = ("fault", "warning", "guard", "stop")
"""Events that show that a run noticed something."""


@dataclass(frozen=True)
class Stage:
    """What is rehearsed: a run, shortened, and where its rehearsals are kept."""

    words: Sequence[str]
    """`run.yaml` and overrides, as `keepstep train` takes them."""
    folder: Path
    steps: int
    processes: int
    timeout_s: float

    def name_words(self, name: str) -> list[str]:
        """What makes a run of this stage: its name, its length, where it lies, how often it saves."""
        save_every = max(2, self.steps // 4)
        return [
            *self.words,
            f"name={name}",
            f"runs_dir={self.folder}",
            f"max_duration={self.steps}ba",
            f"checkpoint.interval={save_every}ba",
            "checkpoint.keep=3",
            "observe.log_interval=1",
        ]

    def run_folder(self, name: str) -> RunFolder:
        """Where a run of this stage writes."""
        return RunFolder(self.folder / name)

    @property
    def middle(self) -> int:
        """A step by which two checkpoints are on disk, and after which there is some way to go."""
        return self.steps // 2 + 1


@dataclass(frozen=True)
class Play:
    """One fault and everything it takes to play it."""

    kind: str
    title: str
    faults: Sequence[Fault] = ()
    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wrap: Sequence[str] = ()
    """What the command is started with: a namespace of its own, say."""
    beside: Callable[[Stage, subprocess.Popen[bytes]], float | None] | None = None
    """Acts while the run runs, and returns when it struck."""
    between: Callable[[Stage], None] | None = None
    """Acts after the run has ended and before it is started again."""
    perform: Callable[[Stage], tuple[float | None, int | None]] | None = None
    """Plays it whole, where one command is not enough; returns when the fault struck and how the run ended."""
    mark: Path | None = None
    """A file that says when the fault struck, where the fault itself leaves it."""
    own_reference: bool = False
    """Whether it changes the run so that it must be compared with an undisturbed one of its own."""
    unnoticed: bool = False
    """Whether a run may pass it over in silence."""
    detect_within_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a run that a fault befell."""

    kind: str
    title: str
    passed: bool
    detected_s: float | None
    recovered_s: float | None
    steps_lost: int | None
    loss_equal: bool
    note: str = ""


def undisturbed(stage: Stage, name: str = "undisturbed", overrides: Sequence[str] = ()) -> dict[int, float]:
    """Run once without a fault; the loss of every step."""
    with started(stage, [*stage.name_words(name), *overrides], name) as process:
        code = wait_for(process, stage.timeout_s)
    if code != 0:
        raise PreflightError(
            f"the run ends with exit code {code} even without a fault", f"see {stage.folder / name}.log"
        )
    return losses(stage.run_folder(name))


def play(stage: Stage, part: Play, wanted: Mapping[int, float]) -> Outcome:
    """Let the fault strike, start the run again as often as it stops itself, and judge."""
    if part.own_reference:
        wanted = undisturbed(stage, f"{part.kind}-undisturbed", part.overrides)
    if part.perform is not None:
        return judge(stage, part, wanted, *part.perform(stage))
    environment = {**part.environment, **to_environment(part.faults, _marks(stage, part))}
    words = [*stage.name_words(part.kind), *part.overrides]
    struck_at: float | None = None
    code: int | None = None
    for _ in range(MOST_STARTS):
        with started(stage, words, part.kind, environment, part.wrap) as process:
            if part.beside is not None and struck_at is None:
                struck_at = part.beside(stage, process)
            code = wait_for(process, stage.timeout_s)
            wait_until_gone(process.pid, ORPHANS_S)
        if part.between is not None and code != 0:
            part.between(stage)
        if code not in (EXIT_STOPPED, -signal.SIGKILL):
            break
    struck_at = struck_at or _struck_at(stage, part)
    return judge(stage, part, wanted, struck_at, code)


def judge(stage: Stage, part: Play, wanted: Mapping[int, float], struck_at: float | None, code: int | None) -> Outcome:
    """From what the run wrote: when it noticed, when it was back, what was lost, whether its losses are the same."""
    folder = stage.run_folder(part.kind)
    equal = losses(folder) == dict(wanted)
    if struck_at is None:
        return Outcome(part.kind, part.title, False, None, None, None, equal, "the fault never struck")
    events = JsonLines(folder.events).read()
    later = [event for event in events if number(event.get("time")) >= struck_at]
    noticed = next((number(event["time"]) for event in later if event.get("kind") in _SIGNS), None)
    if noticed is None:
        noticed = _straggler_seen_at(folder, struck_at)
    resumed = next((event for event in later if event.get("kind") == "resume"), None)
    detected_s = None if noticed is None else noticed - struck_at
    recovered_s = number(resumed["time"]) - struck_at if resumed else _stepped_after(folder, struck_at)
    lost = max(0, _furthest(folder, struck_at) - int(resumed["step"])) if resumed else 0
    note = "" if code == 0 else f"ended with {code}"
    if detected_s is None and not part.unnoticed:
        note = note or "nobody noticed"
    elif part.detect_within_s is not None and detected_s is not None and detected_s > part.detect_within_s:
        note = note or f"noticed only after {detected_s:.1f} s, wanted within {part.detect_within_s:.0f} s"
    return Outcome(part.kind, part.title, equal and not note, detected_s, recovered_s, lost, equal, note)


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, as it was done last."""
    return {int(line["step"]): number(line["loss"]) for line in split_kinds(JsonLines(folder.metrics).read())["train"]}


@contextmanager
def started(
    stage: Stage,
    words: Sequence[str],
    log: str,
    environment: Mapping[str, str] | None = None,
    wrap: Sequence[str] = (),
    verb: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A run as a process of its own session, of which nothing is left afterwards; what it prints goes into a log."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    command = [*wrap, sys.executable, "-m", "keepstep", *(verb or ("train",)), *words]
    if not verb:
        command += ["--procs", str(stage.processes)]
    with (stage.folder / f"{log}.log").open("ab") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def wait_for(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code; None where it did not end in time."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def wait_for_step(folder: RunFolder, step: int, timeout_s: float) -> bool:
    """Whether the run's files come to tell of a step in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if folder.metrics.is_file() and max(losses(folder), default=0) >= step:
            return True
        time.sleep(0.02)
    return False


def session_members(session: int) -> list[int]:
    """Processes that a run started and that still live, whatever became of their parents."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def kill_session(session: int) -> None:
    """End every process of a session, now."""
    for pid in session_members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(session: int, timeout_s: float) -> bool:
    """Whether all processes of a session end by themselves in time."""
    deadline = time.monotonic() + timeout_s
    while session_members(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _marks(stage: Stage, part: Play) -> Path:
    folder = stage.folder / "marks" / part.kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _struck_at(stage: Stage, part: Play) -> float | None:
    if part.mark is not None:
        return float(part.mark.read_text()) if part.mark.is_file() else None
    times = [happened_at(fault, _marks(stage, part)) for fault in part.faults]
    return min((time for time in times if time is not None), default=None)


def _straggler_seen_at(folder: RunFolder, struck_at: float) -> float | None:
    lines: list[Record] = JsonLines(folder.ranks).read()
    return next(
        (number(line.get("time")) for line in lines if number(line.get("time")) >= struck_at and find_straggler(line)),
        None,
    )


def _stepped_after(folder: RunFolder, struck_at: float) -> float | None:
    times = [number(line.get("time")) for line in JsonLines(folder.metrics).read()]
    return next((time - struck_at for time in times if time > struck_at), None)


def _furthest(folder: RunFolder, struck_at: float) -> int:
    lines = JsonLines(folder.metrics).read()
    before = [int(line["step"]) for line in lines if "loss" in line and number(line.get("time")) <= struck_at]
    return max(before, default=0)
