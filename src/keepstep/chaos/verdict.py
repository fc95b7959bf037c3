"""Faults one by one, or many random ones in one run, and the verdict on each from what the run wrote."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from keepstep.chaos.experiment import (
    ORPHANS_S,
    Experiment,
    Outcome,
    Scenario,
    Strike,
    UnavailableError,
    all_are_back,
    losses,
    run_keepstep,
    run_scenario,
    run_undisturbed,
    session_members,
    wait_for,
    wait_until_gone,
)
from keepstep.core.errors import EXIT_STOPPED
from keepstep.observe.run_folder import JsonLines, RunFolder, number
from keepstep.observe.verdict import find_straggler
from keepstep.resilience.fault_injection import ALL_RANKS, Fault, happened_at, to_environment

_NOTICED = ("fault", "left", "spare_lost", "warning", "guard", "stop")
"""Kinds of events by which a run reports that something is wrong."""
KINDS = ("kill", "kill", "kill_all", "exception", "oom", "terminate", "kill_launcher")
"""What strikes; the more frequent a fault is in practice, the more often it is listed."""
_TAIL_STEPS = 5
_CACHES = ("torchinductor_",)
"""Prefixes of what torch leaves in the folder for temporary files on purpose."""


@dataclass(frozen=True)
class Report:
    """All outcomes, and the scenarios that could not run here with the reason."""

    outcomes: list[Outcome]
    left_out: dict[str, str]
    asked_for: bool = False
    """Whether the user named the scenarios: then one that could not run is no pass."""

    @property
    def survived(self) -> bool:
        """Whether the run passed every scenario that ran."""
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        """Survived, and nothing that the user asked for is missing."""
        missing = bool(self.left_out) and (not self.outcomes or self.asked_for)
        return self.survived and not missing

    def as_values(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        faults = [asdict(outcome) for outcome in self.outcomes]
        return {"passed": self.passed, "faults": faults, "left_out": self.left_out}


def run_scenarios(
    experiment: Experiment,
    scenarios: Mapping[str, Callable[[], Scenario]],
    say: Callable[[str], None],
    asked_for: bool = False,
) -> Report:
    """Run each scenario in a separate run, after one baseline for all, and judge."""
    say(f"an undisturbed run of {experiment.steps} steps on {experiment.processes} processes")
    baseline = run_undisturbed(experiment)
    outcomes: list[Outcome] = []
    left_out: dict[str, str] = {}
    for count, (kind, make) in enumerate(scenarios.items(), start=1):
        try:
            outcome = try_scenario(experiment, make(), baseline)
        except UnavailableError as error:
            left_out[kind] = str(error)
            say(f"{count}/{len(scenarios)} {kind}: skipped, {error}")
            continue
        say(f"{count}/{len(scenarios)} {kind}: {'survived' if outcome.passed else 'FAILED ' + outcome.note}")
        outcomes.append(outcome)
    return Report(outcomes, left_out, asked_for)


def try_scenario(experiment: Experiment, scenario: Scenario, baseline: Mapping[int, float]) -> Outcome:
    """Run one scenario and judge it against the baseline's losses."""
    if scenario.own_baseline:
        baseline = run_undisturbed(experiment, f"{scenario.kind}-undisturbed", scenario.overrides)
    return judge(experiment, scenario, baseline, run_scenario(experiment, scenario))


def judge(experiment: Experiment, scenario: Scenario, baseline: Mapping[int, float], strike: Strike) -> Outcome:
    """When the run noticed the fault and was back, the steps it lost, and whether its losses equal the baseline's."""
    folder = experiment.run_folder(scenario.kind)
    equal = losses(folder) == dict(baseline)
    struck_at, exit_code = strike
    if struck_at is None:
        return Outcome(scenario.kind, scenario.title, False, None, None, None, equal, "the fault never struck")
    later = [event for event in JsonLines(folder.events).read() if number(event.get("time")) >= struck_at]
    noticed = next((number(event["time"]) for event in later if event.get("kind") in _NOTICED), None)
    if noticed is None:
        times = (number(line.get("time")) for line in JsonLines(folder.ranks).read() if find_straggler(line))
        noticed = next((time for time in times if time >= struck_at), None)
    resumed = next((event for event in later if event.get("kind") == "resume"), None)
    detected_s = None if noticed is None else noticed - struck_at
    # The survivors may finish a step before they notice that somebody is lost: that one is no recovery.
    delayed = max((int(event["step"]) for event in later if event.get("kind") == "left"), default=0)
    recovered_s = number(resumed["time"]) - struck_at if resumed else _next_step_after_s(folder, struck_at, delayed)
    steps_lost = max(0, _newest_step(folder, struck_at) - int(resumed["step"])) if resumed else 0
    note = _complaint(scenario, exit_code, detected_s)
    if scenario.survivors and not note:
        note = _survivors_complaint(folder, later)
    passed = equal and not note
    return Outcome(scenario.kind, scenario.title, passed, detected_s, recovered_s, steps_lost, equal, note)


def _complaint(scenario: Scenario, exit_code: int | None, detected_s: float | None) -> str:
    if exit_code != 0:
        return f"ended with {exit_code}"
    if detected_s is None:
        return "" if scenario.may_be_unnoticed else "nobody noticed"
    limit_s = scenario.detect_within_s
    if limit_s is not None and detected_s > limit_s:
        return f"noticed only after {detected_s:.1f} s, wanted within {limit_s:.0f} s"
    return ""


def _survivors_complaint(folder: RunFolder, later: Sequence[Mapping[str, Any]]) -> str:
    if {"restart", "resize", "resume"} & {event.get("kind") for event in later}:
        return "the other replicas were restarted"
    steps = [line["step"] for line in JsonLines(folder.metrics).read() if "loss" in line]
    if len(steps) > len(set(steps)):
        return "steps were done twice"
    if not all_are_back(later):
        return "the run ended before the lost replica was replaced: try more --steps"
    return ""


def _next_step_after_s(folder: RunFolder, struck_at: float, step: int) -> float | None:
    """Until the first step after the fault, which is `step` or a later one, was reported."""
    lines = [line for line in JsonLines(folder.metrics).read() if int(line.get("step", 0)) >= step]
    times = [number(line.get("time")) for line in lines]
    return next((time - struck_at for time in times if time > struck_at), None)


def _newest_step(folder: RunFolder, struck_at: float) -> int:
    lines = JsonLines(folder.metrics).read()
    before = [int(line["step"]) for line in lines if "loss" in line and number(line.get("time")) <= struck_at]
    return max(before, default=0)


def sample_faults(count: int, mean_steps: float, processes: int, seed: int) -> list[Fault]:
    """Faults with exponential gaps between them; the same seed gives the same faults."""
    chance = random.Random(seed)
    faults, step = [], 3
    for _ in range(count):
        step += 1 + round(chance.expovariate(1 / mean_steps))
        kind = chance.choice(KINDS)
        rank = ALL_RANKS if kind == "kill_all" else 0 if kind in ("terminate", "kill_launcher") else None
        chosen = chance.randrange(processes) if rank is None else rank
        faults.append(Fault(kind.replace("kill_all", "kill"), step, chosen))
    return faults


def soak(experiment: Experiment, count: int, mean_steps: float, seed: int, say: Callable[[str], None]) -> Report:
    """Inject `count` random faults into one run; an outcome for each, and one for what was left behind."""
    faults = sample_faults(count, mean_steps, experiment.processes, seed)
    timeout_s = experiment.timeout_s * max(1, count / 20)
    experiment = replace(experiment, steps=faults[-1].step + _TAIL_STEPS, timeout_s=timeout_s)
    say(f"an undisturbed run of {experiment.steps} steps")
    baseline = run_undisturbed(experiment)
    marks, scratch = experiment.folder / "marks", experiment.folder / "tmp"
    marks.mkdir()
    scratch.mkdir()
    environment = {**to_environment(faults, marks), "TMPDIR": str(scratch)}
    words = experiment.train_words("soak", ["resilience.max_restarts=20"])
    starts, left_over = 0, 0
    code: int | None = EXIT_STOPPED
    while code in (EXIT_STOPPED, -signal.SIGKILL) and starts <= count:
        starts += 1
        with run_keepstep(words, experiment.log("soak"), environment) as process:
            code = wait_for(process, experiment.timeout_s)
            gone = wait_until_gone(process.pid, ORPHANS_S)
            left_over += 0 if gone else len(session_members(process.pid))
        struck = sum(happened_at(fault, marks) is not None for fault in faults)
        say(f"{struck} of {count} faults struck, start {starts} ended with {code}")
    equal = losses(experiment.run_folder("soak")) == baseline
    leaked = left_over + sum(not path.name.startswith(_CACHES) for path in scratch.iterdir())
    note = "" if code == 0 and not leaked else f"ended with {code}, {leaked} processes or folders left"
    leaks = Outcome("leaks", "nothing left behind", not note, None, None, None, equal, note)
    return Report([*_fault_outcomes(experiment, faults, equal), leaks], {})


def _fault_outcomes(experiment: Experiment, faults: Sequence[Fault], equal: bool) -> Iterator[Outcome]:
    events = JsonLines(experiment.run_folder("soak").events).read()
    resumed_at = [number(event["time"]) for event in events if event.get("kind") == "resume"]
    for fault in faults:
        at = happened_at(fault, experiment.folder / "marks")
        recovered_s = next((moment - at for moment in resumed_at if at is not None and moment > at), None)
        title = f"{fault.kind} after step {fault.step}, rank {'all' if fault.rank == ALL_RANKS else fault.rank}"
        yield Outcome(fault.kind, title, at is not None and equal, None, recovered_s, None, equal)
