"""A fault experiment: inject a fault into the user's own run, let the run recover, and compare it with a baseline."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.config.schema import RunConfig
from keepstep.core import proc
from keepstep.core.errors import EXIT_STOPPED, PreflightError
from keepstep.core.verbosity import VARIABLE, debug
from keepstep.observe.run_folder import JsonLines, RunFolder, number, split_kinds
from keepstep.resilience.fault_injection import ALL_RANKS, Fault, happened_at, to_environment

MOST_STARTS = 5
"""Times a person, or a scheduler, would start a stopped run again before looking into it."""
ORPHANS_S = 60.0
"""Time for processes to end by themselves after their launcher was killed."""
Strike = tuple[float | None, int | None]
"""When the fault struck, None if never, and the run's exit code, None if it did not end."""


class UnavailableError(Exception):
    """A scenario that cannot run on this machine, with the reason."""


@dataclass(frozen=True)
class Experiment:
    """The run under test, shortened, and the folder of its runs."""

    words: Sequence[str]
    """`run.yaml` and overrides, as `keepstep train` takes them."""
    folder: Path
    steps: int
    processes: int
    timeout_s: float
    replica_size: int = 1
    """Processes of each replica, where replicas survive each other: more than one shard its weights."""

    def run_words(self, name: str) -> list[str]:
        """Config file and overrides of one run: its name, folder, length and save interval."""
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

    def train_words(self, name: str, overrides: Sequence[str] = (), processes: int | None = None) -> list[str]:
        """The `keepstep train` command of one run."""
        return ["train", *self.run_words(name), *overrides, "--procs", str(processes or self.processes)]

    def run_folder(self, name: str) -> RunFolder:
        """Where a run of this experiment writes."""
        return RunFolder(self.folder / name)

    def log(self, name: str) -> Path:
        """What a run of this experiment prints."""
        return self.folder / f"{name}.log"

    @property
    def middle(self) -> int:
        """A step with two checkpoints before it and several steps after it."""
        return self.steps // 2 + 1


@dataclass(frozen=True)
class Scenario:
    """One fault and how it is injected."""

    kind: str
    title: str
    faults: Sequence[Fault] = ()
    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wrap: Sequence[str] = ()
    """Command that the run is started with, such as `unshare`."""
    inject: Callable[[Experiment, subprocess.Popen[bytes]], float | None] | None = None
    """Injects the fault from outside while the run is running; returns when, in unix time."""
    run: Callable[[Experiment], Strike] | None = None
    """Runs the whole scenario where one command is not enough."""
    mark: Path | None = None
    """File with the time at which the fault struck, where the fault itself writes it."""
    own_baseline: bool = False
    """Whether its overrides change the losses, so that it needs its own baseline."""
    may_be_unnoticed: bool = False
    """Whether the run may recover without reporting anything."""
    detect_within_s: float | None = None
    processes: int | None = None
    """If not those of the experiment."""
    survivors: bool = False
    """Whether processes that the fault does not touch must continue, without a restart."""


@dataclass(frozen=True)
class Outcome:
    """How a run got through one fault."""

    kind: str
    title: str
    passed: bool
    detected_s: float | None
    recovered_s: float | None
    steps_lost: int | None
    loss_equal: bool
    note: str = ""


def same_threads(config: RunConfig, processes: int) -> list[str]:
    """The override that gives every run the same number of threads: more threads add up in another order."""
    if config.compute.threads:
        return []
    return [f"compute.threads={max(1, proc.available_cores() // processes)}"]


def run_undisturbed(
    experiment: Experiment, name: str = "undisturbed", overrides: Sequence[str] = ()
) -> dict[int, float]:
    """The baseline: run once without a fault; returns the loss of every step."""
    with run_keepstep(experiment.train_words(name, overrides), experiment.log(name)) as process:
        code = wait_for(process, experiment.timeout_s)
    if code != 0:
        raise PreflightError(f"the run ends with exit code {code} even without a fault", f"see {experiment.log(name)}")
    return losses(experiment.run_folder(name))


def run_scenario(experiment: Experiment, scenario: Scenario) -> Strike:
    """Inject the fault and start the run again as often as it stops itself."""
    if scenario.run is not None:
        return scenario.run(experiment)
    marks = experiment.folder / "marks" / scenario.kind
    marks.mkdir(parents=True, exist_ok=True)
    environment = {**scenario.environment, **to_environment(scenario.faults, marks)}
    words = experiment.train_words(scenario.kind, scenario.overrides, scenario.processes)
    struck_at: float | None = None
    code: int | None = None
    for _ in range(MOST_STARTS):
        with run_keepstep(words, experiment.log(scenario.kind), environment, scenario.wrap) as process:
            if scenario.inject is not None and struck_at is None:
                struck_at = scenario.inject(experiment, process)
            code = wait_for(process, experiment.timeout_s)
            wait_until_gone(process.pid, ORPHANS_S)
        if code not in (EXIT_STOPPED, -signal.SIGKILL):
            break
    return struck_at or _struck_at(scenario, marks), code


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step; of a repeated step, the last."""
    return {int(line["step"]): number(line["loss"]) for line in split_kinds(JsonLines(folder.metrics).read())["train"]}


def wait_for_event(folder: RunFolder, kind: str, timeout_s: float) -> bool:
    """Whether the run reports an event of this kind in time."""
    return _in_time(lambda: any(event.get("kind") == kind for event in JsonLines(folder.events).read()), timeout_s)


def _in_time(happened: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_replacement(experiment: Experiment, kind: str, step: int) -> Fault:
    """The run waits after each step from this one on, until `release_when_all_are_back` says so."""
    return Fault("wait", step, ALL_RANKS, {"file": str(_back_mark(experiment, kind))})


def release_when_all_are_back(
    experiment: Experiment, process: subprocess.Popen[bytes], kind: str, since: float = 0.0
) -> None:
    """Watch a run of survivors: when every replica lost `since` then has been replaced, nobody waits any more."""
    events, deadline = JsonLines(experiment.run_folder(kind).events), time.monotonic() + experiment.timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if all_are_back([event for event in events.read() if number(event.get("time")) >= since]):
            break
        time.sleep(0.05)
    _back_mark(experiment, kind).touch()


def _back_mark(experiment: Experiment, kind: str) -> Path:
    return experiment.folder / f"{kind}.back"


def all_are_back(events: Sequence[Mapping[str, object]]) -> bool:
    """Whether a replica has joined, or a spare is ready again, for each one that was lost."""
    missing: set[object] = set()
    came = False
    for event in events:
        if event.get("kind") in ("left", "spare_lost"):
            missing.add(event.get("replica"))
        elif event.get("kind") in ("joined", "spare_ready"):
            missing.discard(event.get("replica"))
            came = True
    return came and not missing


def wait_for_step(folder: RunFolder, step: int, timeout_s: float) -> bool:
    """Whether the run's metrics reach a step in time."""
    return _in_time(lambda: folder.metrics.is_file() and max(losses(folder), default=0) >= step, timeout_s)


def _struck_at(scenario: Scenario, marks: Path) -> float | None:
    if scenario.mark is not None:
        return float(scenario.mark.read_text()) if scenario.mark.is_file() else None
    times = [happened_at(fault, marks) for fault in scenario.faults]
    return min((time for time in times if time is not None), default=None)


@contextmanager
def run_keepstep(
    words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, wrap: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`keepstep WORDS` in a new session; its output goes to `log`, and none of its processes is left behind.

    `wrap` is a command that the run is started with, such as `unshare`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*wrap, sys.executable, "-m", "keepstep", *words]
    debug(shlex.join(command))
    # -q is for what this command prints: the log of the run stays complete.
    variables = {**os.environ, VARIABLE: "", **(environment or {})}
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def wait_for(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code; None where the process did not end in time."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def session_members(session: int) -> list[int]:
    """The processes of a session that are still running, even if their parents are gone."""
    return [process.pid for process in proc.processes() if process.session == session and process.running]


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session."""
    for pid in session_members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(session: int, timeout_s: float) -> bool:
    """Whether all processes of a session end by themselves in time."""
    return _in_time(lambda: not session_members(session), timeout_s)
