"""How is it going? One word for a run, with its reasons, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from keepstep.core.units import Duration, format_seconds
from keepstep.observe.columns import FloatArray
from keepstep.observe.folder import Record, number
from keepstep.observe.goodput import SILENT_S, SILENT_STEPS
from keepstep.observe.history import History

State = Literal["starting", "healthy", "degraded", "recovering", "stalled", "stopped", "failed", "finished"]

RECOVERY_S = 600.0
"""A recovery that shows no step for this long is stalled."""
SLOW_SHARE = 0.8
"""Degraded: the last steps run below this share of the run's usual speed."""
STRAGGLER_SHARE = 1.25
"""A rank this much slower than the median is named."""
STALE_CHECKPOINTS = 3.0
"""Degraded: no checkpoint for this many of the usual intervals."""
WARNING_S = 300.0
"""A warning counts for this long."""
RECENT_STEPS = 20
USUAL_STEPS = 2000


@dataclass(frozen=True)
class Verdict:
    """The state of a run and what a person wants to know first."""

    state: State
    reasons: list[str]
    step: int = 0
    total_steps: int = 0
    loss: float = math.nan
    eta_s: float = math.nan
    checkpoint_step: int = -1
    """Newest durable checkpoint; -1 before the first."""
    checkpoint_age_s: float = math.nan
    at_risk_s: float = 0.0
    """Seconds of work that would be lost if every process were killed now."""
    at_risk_steps: int = 0
    silent_s: float = math.nan
    ranks: int = 0
    restarts: int = 0
    straggler: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether more is expected from the run."""
        return self.state not in ("stopped", "failed", "finished")


def judge(history: History, now: float) -> Verdict:
    """Read the signs. `now` is passed in, so a test needs no clock."""
    events, train = history.events, history.train
    last_step_time = train.last("time")
    silent_s = now - max([t for t in (last_step_time, _last_time(events)) if math.isfinite(t)], default=now)
    step = int(train.last("step")) if len(train) else 0
    checkpoint = _newest(events, "checkpoint_committed")
    straggler = find_straggler(_ranks_now(history))
    state, reasons = _state(history, now, silent_s, straggler)
    at_risk_s, at_risk_steps = _at_risk(history, checkpoint)
    return Verdict(
        state=state,
        reasons=reasons,
        step=step,
        total_steps=total_steps(history),
        loss=train.last("loss"),
        eta_s=_eta_s(history, step) if state not in ("finished", "stopped", "failed") else math.nan,
        checkpoint_step=int(saved) if math.isfinite(saved := number(checkpoint.get("step"))) else -1,
        checkpoint_age_s=now - number(checkpoint.get("time")),
        at_risk_s=at_risk_s,
        at_risk_steps=at_risk_steps,
        silent_s=silent_s,
        ranks=_ranks(events),
        restarts=max(_count(events, "restart"), _count(events, "resume")),
        straggler=straggler,
    )


def _state(history: History, now: float, silent_s: float, straggler: Record) -> tuple[State, list[str]]:
    events, train = history.events, history.train
    lifecycle = [event for event in events if event.get("kind") in _LIFECYCLE]
    newest = lifecycle[-1] if lifecycle else {}
    kind, since = newest.get("kind"), number(newest.get("time"))
    stepped_since = len(train) > 0 and not train.last("time") <= since
    if kind == "finish":
        return "finished", []
    if kind == "stop" and not stepped_since:
        return "stopped", [str(newest.get("reason") or "stopped on request: start the same command again")]
    if kind == "fault" and newest.get("final"):
        return "failed", [describe(newest)]
    trouble = next((event for event in reversed(lifecycle) if event.get("kind") in ("fault", "resize")), None)
    if not stepped_since and trouble is not None:
        told = describe(trouble) if trouble.get("kind") == "fault" else str(trouble.get("kind"))
        if silent_s > RECOVERY_S:
            return "stalled", [f"no step since {told}, silent for {format_seconds(silent_s)}"]
        return "recovering", [told]
    usual_s = _usual_step_s(history)
    if silent_s > max(SILENT_S, SILENT_STEPS * usual_s) or (not stepped_since and silent_s > RECOVERY_S):
        return "stalled", [f"no sign of life for {format_seconds(silent_s)}; a step usually takes {usual_s:.3g} s"]
    if not stepped_since:
        return "starting", ["no step yet"]
    if trouble is not None and (left := _steps_to_redo(trouble, train.last("step"))) > 0:
        return "recovering", [f"{describe(trouble)}: {left} steps to do again"]
    reasons = _worries(history, now, straggler)
    return ("degraded", reasons) if reasons else ("healthy", [])


def _steps_to_redo(trouble: Record, step: float) -> int:
    """Steps that were done before a fault and are not done again yet."""
    reached = number(trouble.get("step"))
    return int(reached - step) if trouble.get("kind") == "fault" and reached > step else 0


_LIFECYCLE = ("start", "resume", "fault", "restart", "resize", "stop", "finish")


def _worries(history: History, now: float, straggler: Record) -> list[str]:
    events, train = history.events, history.train
    worries: list[str] = []
    if not math.isfinite(train.last("loss")):
        worries.append(f"the loss is {train.last('loss')}")
    speed = train.column("tokens_per_s")
    if len(speed) >= 3 * RECENT_STEPS and np.isfinite(speed[-USUAL_STEPS:]).any():
        usual, recent = np.nanmedian(speed[-USUAL_STEPS:]), np.nanmedian(speed[-RECENT_STEPS:])
        if recent < SLOW_SHARE * usual:
            worries.append(f"speed fell to {recent / usual:.0%} of the usual")
    if straggler:
        worries.append(f"rank {straggler['rank']} takes {straggler['ratio']:.2f} times the median step")
    started, running = _started_ranks(events), _ranks(events)
    if 0 < running < started:
        worries.append(f"{running} of {started} ranks are left")
    commits = [number(event.get("time")) for event in events if event.get("kind") == "checkpoint_committed"]
    if len(commits) >= 3 and now - commits[-1] > max(SILENT_S, STALE_CHECKPOINTS * float(np.median(np.diff(commits)))):
        worries.append(f"the last checkpoint is {format_seconds(now - commits[-1])} old")
    warning = _newest(events, "warning")
    if warning and now - number(warning.get("time")) < WARNING_S:
        worries.append(describe(warning))
    return worries


def describe(event: Record) -> str:
    """A fault, a warning or what the guard did in a few words."""
    kind, rank = event.get("kind"), event.get("rank")
    if kind == "guard":
        return f"{event.get('what')}: {event.get('action')}, samples from {event.get('first_sample')}"
    what = str(next((event[key] for key in ("message", "what", "text", "reason") if event.get(key)), f"a {kind}"))
    return what if kind != "fault" or rank is None or "rank" in what else f"{what} (rank {rank})"


def find_straggler(ranks: Record) -> dict[str, float | int | str]:
    """The slowest rank of a look at all ranks when it is clearly slower than the median; else empty."""
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
    """Each rank's step without its waiting for others, which takes as long on a fast rank as on a slow one.

    Waiting is `wait_s` where it was measured. Else the wait for data tells: all ranks meet at the start of a step, so
    one whose data came early waited there for the one whose data came last.
    """
    seconds, waits, data = (_by_rank(ranks.get(name)) for name in ("step_s", "wait_s", "data_s"))
    if len(waits) != len(seconds):
        waits = data.max() - data if len(data) and len(data) == len(seconds) else np.zeros(len(seconds))
    own: list[float] = (seconds - np.nan_to_num(waits)).tolist()
    return own


def _ranks_now(history: History) -> Record:
    """The newest look at all ranks, where it is of the processes that train now: numbers go to others at a start."""
    begun = max((number(e.get("time")) for e in history.events if e.get("kind") in _BEGINS), default=-math.inf)
    look = history.newest_ranks()
    return {} if number(look.get("time")) < begun else look


_BEGINS = ("start", "resume", "resize")


def _by_rank(values: object) -> FloatArray:
    return np.array([number(value) for value in values] if isinstance(values, list) else [], dtype=np.float64)


def _at_risk(history: History, checkpoint: Record) -> tuple[float, int]:
    steps, step_s = history.train.column("step"), history.train.column("step_s")
    safe = number(checkpoint.get("step")) if checkpoint else -math.inf
    first = int(np.searchsorted(steps, safe, side="right"))
    return float(np.nansum(step_s[first:])), len(steps) - first


def _eta_s(history: History, step: int) -> float:
    """By the wall clock of the last steps, so that saves and validation are in it."""
    train, total = history.train, total_steps(history)
    if len(train) < 2 or not total:
        return math.nan
    begin = max((number(e.get("time")) for e in history.events if e.get("kind") in ("start", "resume")), default=0.0)
    times, steps = train.column("time")[-200:], train.column("step")[-200:]
    times, steps = times[times >= begin], steps[times >= begin]
    if len(times) < 2 or steps[-1] <= steps[0]:
        return max(0, total - step) * _usual_step_s(history)
    return float(max(0, total - step) * (times[-1] - times[0]) / (steps[-1] - steps[0]))


def _usual_step_s(history: History) -> float:
    recent = history.train.column("step_s")[-200:]
    return float(np.nanmedian(recent)) if np.isfinite(recent).any() else 0.0


def total_steps(history: History) -> int:
    """Steps the run is to take: as its newest start told, or as its configuration says in steps; 0 when unknown."""
    for event in reversed(history.events):
        if total := _whole(event.get("total_steps")):
            return total
    if total := _whole(history.facts().get("total_steps")):
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


def _whole(value: object) -> int:
    """A count as the files tell it; 0 where it is none."""
    told = number(value)
    return int(told) if math.isfinite(told) else 0


def _ranks(events: Sequence[Record]) -> int:
    return next((count for event in reversed(events) if (count := _told_ranks(event))), 0)


def _started_ranks(events: Sequence[Record]) -> int:
    return next((count for event in events if (count := _told_ranks(event))), 0)


def _told_ranks(event: Record) -> int:
    """How many train, where an event tells it; a fault may name the `ranks` it was found on instead."""
    told = event.get("world_size") or event.get("ranks")
    return told if isinstance(told, int) else 0


def _count(events: Sequence[Record], kind: str) -> int:
    return sum(event.get("kind") == kind for event in events)


def _newest(events: Sequence[Record], kind: str) -> Record:
    return next((event for event in reversed(events) if event.get("kind") == kind), {})


def _last_time(events: Sequence[Record]) -> float:
    return max((number(event.get("time")) for event in events[-20:]), default=math.nan)
