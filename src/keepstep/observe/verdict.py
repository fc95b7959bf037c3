"""The state of a run in one word, with reasons, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from keepstep.core.step_folders import newest_saved_step
from keepstep.core.units import Duration, format_seconds
from keepstep.observe.goodput import SILENT_S, SILENT_STEPS, usual_step_s
from keepstep.observe.history import History
from keepstep.observe.run_folder import Record, number, whole

State = Literal["starting", "healthy", "degraded", "recovering", "stalled", "stopped", "failed", "finished", "damaged"]

RECOVERY_S = 600.0
"""A recovery without a step for this long is stalled."""
SLOW_SHARE = 0.8
"""Degraded: the last steps are below this share of the run's usual speed."""
STRAGGLER_SHARE = 1.25
"""A rank that takes this many times the median is a straggler."""
AHEAD_S = 600.0
"""How far the clock of the machine that trains may be ahead of this one's."""
STALE_CHECKPOINTS = 3.0
"""Degraded: no checkpoint for this many usual intervals."""
WARNING_S = 300.0
"""A warning counts for this long."""
_LIFECYCLE = ("start", "resume", "fault", "restart", "resize", "stop", "finish")
RECENT_STEPS = 20
USUAL_STEPS = 2000


@dataclass(frozen=True)
class Verdict:
    """The state of a run and its most important figures."""

    state: State
    reasons: list[str]
    step: int = 0
    total_steps: int = 0
    loss: float = math.nan
    eta_s: float = math.nan
    checkpoint_step: int = -1
    """The same as `saved_step`, under its older name."""
    checkpoint_age_s: float = math.nan
    saved_step: int = -1
    """Step of the newest checkpoint on disk; -1 if there is none."""
    skipped_saves: int = 0
    """Saves that failed and were not repeated."""
    at_risk_s: float = 0.0
    """Seconds of work that would be lost if all processes were killed now."""
    at_risk_steps: int = 0
    silent_s: float = math.nan
    ranks: int = 0
    restarts: int = 0
    straggler: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether the run is still expected to write something."""
        return self.state not in ("stopped", "failed", "finished", "damaged")


def judge(history: History, now: float) -> Verdict:
    """Judge a run at the time `now`."""
    events, train = history.events, history.train
    signs = [train.last("time"), *(number(event.get("time")) for event in events[-20:])]
    # A sign from the future is from before the clock was set back, or from a machine whose clock is ahead.
    silent_s = max(0.0, now - max([sign for sign in signs if sign < now + AHEAD_S], default=now))
    step = int(train.last("step")) if len(train) else 0
    saves = find_saves(history)
    kinds = [event.get("kind") for event in events]
    straggler = find_straggler(_ranks_now(history))
    state, reasons = _state(history, saves, now, silent_s, straggler)
    at_risk_s, at_risk_steps = _at_risk(history, saves)
    return Verdict(
        state=state,
        reasons=[*reasons, *history.damage()],
        step=step,
        total_steps=total_steps(history),
        loss=train.last("loss"),
        eta_s=_eta_s(history, step) if state not in ("finished", "stopped", "failed") else math.nan,
        checkpoint_step=saves.step,
        checkpoint_age_s=max(0.0, now - saves.time) if math.isfinite(saves.time) else math.nan,
        saved_step=saves.step,
        skipped_saves=len(saves.skipped),
        at_risk_s=at_risk_s,
        at_risk_steps=at_risk_steps,
        silent_s=silent_s,
        ranks=next(reversed(_rank_counts(events)), 0),
        restarts=max(kinds.count("restart"), kinds.count("resume")),
        straggler=straggler,
    )


def _state(history: History, saves: Saves, now: float, silent_s: float, straggler: Record) -> tuple[State, list[str]]:
    events, train = history.events, history.train
    lifecycle = [event for event in events if event.get("kind") in _LIFECYCLE]
    newest = lifecycle[-1] if lifecycle else {}
    kind, since = newest.get("kind"), number(newest.get("time"))
    stepped_since = len(train) > 0 and not train.last("time") <= since
    # A step reports that the clock was set; the times of the steps after it may be before the start.
    last = next((event for event in reversed(events) if event is newest or event.get("reason") == "clock_set"), newest)
    stepped_since = stepped_since or last is not newest
    if kind == "finish":
        return _finished(int(train.last("step")) if len(train) else 0, saves)
    if kind == "stop" and not stepped_since:
        return "stopped", [str(newest.get("reason") or "stopped on request: start the same command again")]
    if kind == "fault" and newest.get("final"):
        return "failed", [describe(newest)]
    trouble = next((event for event in reversed(lifecycle) if event.get("kind") in ("fault", "resize")), None)
    if not stepped_since and trouble is not None:
        cause = describe(trouble) if trouble.get("kind") == "fault" else str(trouble.get("kind"))
        if silent_s > RECOVERY_S:
            return "stalled", [f"no step since {cause}, silent for {format_seconds(silent_s)}"]
        return "recovering", [cause]
    usual_s = usual_step_s(history.train)
    if silent_s > max(SILENT_S, SILENT_STEPS * usual_s) or (not stepped_since and silent_s > RECOVERY_S):
        usual = f"a step usually takes {usual_s:.3g} s" if usual_s else "it has not done a step yet"
        return "stalled", [f"no sign of life for {format_seconds(silent_s)}; {usual}"]
    if not stepped_since:
        return "starting", ["no step yet"]
    if trouble is not None and (left := _steps_to_redo(trouble, train.last("step"))) > 0:
        return "recovering", [f"{describe(trouble)}: {left} steps to repeat"]
    reasons = _problems(history, saves, now, straggler)
    return ("degraded", reasons) if reasons else ("healthy", [])


def _finished(step: int, saves: Saves) -> tuple[State, list[str]]:
    """A run whose last step was never saved is not finished, unless its configuration says so."""
    if saves.step >= step:
        return "finished", []
    on_disk = f"only step {saves.step} is on disk" if saves.step >= 0 else "no step is on disk"
    if saves.recorded_step >= step:
        return "finished", [f"step {step} was saved, but it is not on disk any more: {on_disk}"]
    if not saves.at_end:
        return "finished", [f"{on_disk}: checkpoint.at_end is false"]
    return "failed", [f"it did all {step} steps, but {on_disk}"]


def _steps_to_redo(trouble: Record, step: float) -> int:
    """Steps that were done before a fault and still have to be repeated."""
    reached = number(trouble.get("step"))
    return int(reached - step) if trouble.get("kind") == "fault" and reached > step else 0


def _problems(history: History, saves: Saves, now: float, straggler: Record) -> list[str]:
    events, train = history.events, history.train
    problems: list[str] = []
    if not math.isfinite(train.last("loss")):
        problems.append(f"the loss is {train.last('loss')}")
    speed = train.column("tokens_per_s")
    if len(speed) >= 3 * RECENT_STEPS and np.isfinite(speed[-USUAL_STEPS:]).any():
        usual, recent = np.nanmedian(speed[-USUAL_STEPS:]), np.nanmedian(speed[-RECENT_STEPS:])
        if recent < SLOW_SHARE * usual:
            problems.append(f"speed fell to {recent / usual:.0%} of the usual")
    if straggler:
        problems.append(f"rank {straggler['rank']} takes {straggler['ratio']:.2f} times the median step")
    ranks = _rank_counts(events)
    if ranks and ranks[-1] < ranks[0]:
        problems.append(f"{ranks[-1]} of {ranks[0]} ranks are left")
    commits = [number(event.get("time")) for event in events if event.get("kind") == "checkpoint_committed"]
    if len(commits) >= 3 and now - commits[-1] > max(SILENT_S, STALE_CHECKPOINTS * float(np.median(np.diff(commits)))):
        problems.append(f"the last checkpoint is {format_seconds(now - commits[-1])} old")
    if saves.skipped and saves.skipped[-1] > saves.step:
        problems.append(f"saves skipped: {len(saves.skipped)}, the newest of step {saves.skipped[-1]}")
    warning = next((event for event in reversed(events) if event.get("kind") == "warning"), None)
    if warning and now - number(warning.get("time")) < WARNING_S:
        problems.append(describe(warning))
    return problems


def describe(event: Record) -> str:
    """A fault, a warning or an action of the guard in a few words."""
    kind, rank = event.get("kind"), event.get("rank")
    if kind == "guard":
        return f"{event.get('what')}: {event.get('action')}, samples from {event.get('first_sample')}"
    what = str(next((event[key] for key in ("message", "what", "text", "reason") if event.get(key)), f"a {kind}"))
    return what if kind != "fault" or rank is None or "rank" in what else f"{what} (rank {rank})"


def find_straggler(ranks: Record) -> dict[str, float | int | str]:
    """The slowest rank in a sample of all ranks if it is clearly slower than the median; else empty."""
    own = np.array(own_seconds(ranks))
    if len(own) < 2 or not np.isfinite(own).any():
        return {}
    median, slowest = float(np.nanmedian(own)), int(np.nanargmax(own))
    if not median > 0 or own[slowest] < STRAGGLER_SHARE * median:
        return {}
    hosts = ranks.get("host") or []
    host = str(hosts[slowest]) if slowest < len(hosts) else ""
    return {"rank": slowest, "ratio": float(own[slowest] / median), "seconds": float(own[slowest]), "host": host}


def own_seconds(ranks: Record) -> list[float]:
    """Each rank's step time without its waiting for other ranks: with it, all ranks take the same time.

    The waiting is `wait_s` if it was measured. Otherwise it follows from the wait for data: ranks synchronise at the
    start of a step, so a rank whose data arrived early waited for the rank whose data arrived last.
    """
    lists = [ranks.get(name) for name in ("step_s", "wait_s", "data_s")]
    seconds, waits, data = (np.array(list(map(number, each)) if isinstance(each, list) else []) for each in lists)
    if len(waits) != len(seconds):
        waits = data.max() - data if len(data) and len(data) == len(seconds) else np.zeros(len(seconds))
    own: list[float] = (seconds - np.nan_to_num(waits)).tolist()
    return own


def _ranks_now(history: History) -> Record:
    """The newest sample of all ranks, if it is of the current processes: a restart assigns new rank numbers."""
    kinds = ("start", "resume", "resize")
    started = max((number(e.get("time")) for e in history.events if e.get("kind") in kinds), default=-math.inf)
    ranks = history.newest_ranks()
    return {} if number(ranks.get("time")) < started else ranks


def _at_risk(history: History, saves: Saves) -> tuple[float, int]:
    steps, step_s = history.train.column("step"), history.train.column("step_s")
    first = int(np.searchsorted(steps, saves.step, side="right"))
    return float(np.nansum(step_s[first:])), len(steps) - first


def _eta_s(history: History, step: int) -> float:
    """From the wall clock of the last steps, so that saves and validations are included."""
    train, total = history.train, total_steps(history)
    if len(train) < 2 or not total:
        return math.nan
    begin = max((number(e.get("time")) for e in history.events if e.get("kind") in ("start", "resume")), default=0.0)
    times, steps = train.column("time")[-200:], train.column("step")[-200:]
    times, steps = times[times >= begin], steps[times >= begin]
    usual_s = usual_step_s(train)
    if len(times) < 2 or steps[-1] <= steps[0]:
        return max(0, total - step) * usual_s
    took_s = np.diff(times)
    # The clock was set, or the process was paused: neither says anything about the steps to come.
    took_s[(took_s < 0) | (took_s > max(SILENT_S, SILENT_STEPS * usual_s))] = usual_s
    return float(max(0, total - step) * took_s.sum() / (steps[-1] - steps[0]))


def total_steps(history: History) -> int:
    """Steps of the whole run, from its newest start event or its configuration; 0 if unknown."""
    for event in reversed(history.events):
        if total := whole(event.get("total_steps")):
            return total
    if total := whole(history.facts().get("total_steps")):
        return total
    for line in history.config_text().splitlines():
        key, _, value = line.partition(":")
        if key == "max_duration":
            try:
                duration = Duration.parse(value.strip().strip("'\""))
            except ValueError:
                return 0
            return int(duration.value) if duration.unit == "ba" else 0
    return 0


def _rank_counts(events: Sequence[Record]) -> list[int]:
    """The numbers of ranks that events have; a fault may list the `ranks` it concerns instead."""
    counts = [event.get("world_size") or event.get("ranks") for event in events]
    return [count for count in counts if isinstance(count, int) and count]


@dataclass(frozen=True)
class Saves:
    """The newest committed checkpoint of a run, and the saves that failed."""

    step: int = -1
    """Step of the newest checkpoint on disk; -1 if there is none."""
    time: float = math.nan
    recorded_step: int = -1
    """The largest step that the run recorded as committed. Its checkpoint may have been removed since."""
    skipped: tuple[int, ...] = ()
    """Steps whose save failed and was not repeated."""
    at_end: bool = True
    """Whether the run saves its last step."""


def find_saves(history: History) -> Saves:
    """Read the markers on disk where this machine sees them, else the events of the run."""
    commits = [event for event in history.events if event.get("kind") == "checkpoint_committed"]
    steps = {whole(event.get("step"), -1) for event in commits}
    failed = {whole(event.get("step"), -1) for event in history.events if _is_failed_save(event)}
    config = history.config_text()
    folder = _checkpoint_folder(config, history.folder.checkpoints)
    step, time = (newest_saved_step(folder) if folder is not None else None) or (-1, math.nan)
    if folder is None and commits:
        step, time = whole(commits[-1].get("step"), -1), number(commits[-1].get("time"))
    return Saves(
        step,
        time,
        recorded_step=max(steps, default=-1),
        skipped=tuple(sorted(failed - steps - {step})),
        at_end=_setting(config, "at_end") != "false",
    )


def _is_failed_save(event: Record) -> bool:
    kind = event.get("kind")
    return kind == "save_skipped" or (kind == "warning" and event.get("reason") == "checkpoint_failed")


def _checkpoint_folder(config: str, default: Path) -> Path | None:
    """The local folder of the checkpoints; None if it is remote, relative to an unknown folder, or not mounted here."""
    named = _setting(config, "folder")
    if named and not Path(named).is_absolute():
        return None
    folder = Path(named) if named else default
    return folder if folder.is_dir() else None


def _setting(config: str, name: str) -> str:
    """A value of the `checkpoint` section, by lines: a list of many runs has no time to parse YAML."""
    inside = False
    for line in config.splitlines():
        if not line.startswith(" "):
            inside = line.startswith("checkpoint:")
        elif inside and line.strip().startswith(f"{name}:"):
            return line.partition(":")[2].partition(" #")[0].strip().strip("'\"")
    return ""
