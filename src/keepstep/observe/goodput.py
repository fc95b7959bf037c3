"""Goodput: every second of a run's wall clock under one cause, from its events and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.observe.columns import Columns, FloatArray
from keepstep.observe.history import History
from keepstep.observe.run_folder import Record, number

Cause = Literal["training", "startup", "lost", "down"]
CAUSES: dict[str, str] = {
    "productive": "steps that count",
    "data": "waiting for data",
    "checkpoint": "training blocked by a save",
    "evaluate": "validation and samples",
    "stall": "steps done again for a lost replica, and replicas joining",
    "startup": "from the start of an attempt to its first step",
    "lost": "steps that were done and then rolled back",
    "down": "no process was running",
}
"""What the wall clock is split into, in the order of display."""
BEGINS = ("start", "resume")
ENDS = ("fault", "stop", "finish")
SILENT_S = 60.0
SILENT_STEPS = 20.0
"""A run is silent after a minute or the time of 20 steps, whichever is longer."""


@dataclass(frozen=True)
class Segment:
    """One part of the timeline."""

    start: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class Goodput:
    """Seconds by cause (keys of CAUSES); they add up to the wall clock."""

    seconds: dict[str, float]
    segments: list[Segment]

    @property
    def wall_s(self) -> float:
        """From the first start to the end, or until now."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the wall clock spent in steps that count; 0 before the start."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True)
class _Attempt:
    begin: float
    end: float
    resumed_at: float
    """Step that a later attempt resumed from; infinite if there is none, or it is not known yet."""
    tail: Cause
    """What the time after its last step counts as: a save on request, or a step that was never finished."""


def account(history: History, now: float) -> Goodput:
    """Split the run's wall clock. `now` counts only while the run has neither finished nor stopped."""
    events, train = history.events, history.train
    steps = _steps(train, history.rolled_back)
    attempts = _attempts(events, steps[0], now)
    segments: list[Segment] = []
    for index, attempt in enumerate(attempts):
        if index and attempts[index - 1].end < attempt.begin:
            segments.append(Segment(attempts[index - 1].end, attempt.begin, "down"))
        segments += _attempt_segments(attempt, *steps)
    segments = _with_silence(segments, events, train)
    return Goodput(_seconds(segments, events, train), segments)


def _steps(train: Columns, rolled_back: Columns) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Every step that was ever done, by time: when it ended, its number (infinite if rolled back), its seconds."""
    numbers = np.concatenate([train.column("step"), np.full(len(rolled_back), np.inf)])
    times, took_s = (np.concatenate([train.column(name), rolled_back.column(name)]) for name in ("time", "step_s"))
    # The clock may have been set back during the run.
    sorted_already = not len(rolled_back) and not (np.diff(times) < 0).any()
    order = slice(None) if sorted_already else np.argsort(times, kind="stable")
    return times[order], numbers[order], took_s[order]


def _attempt_segments(attempt: _Attempt, *steps: FloatArray) -> list[Segment]:
    """Startup, then training and lost steps in turn: a run that rolls back loses steps within an attempt."""
    first = int(np.searchsorted(steps[0], attempt.begin))
    end = int(np.searchsorted(steps[0], attempt.end, side="right"))
    times, numbers, took_s = (each[first:end] for each in steps)
    if not len(times):
        return [Segment(attempt.begin, attempt.end, "startup")]
    lost = (numbers > attempt.resumed_at) | np.isinf(numbers)
    first_s = float(took_s[0]) if np.isfinite(took_s[0]) else 0.0
    segments = [Segment(attempt.begin, max(attempt.begin, float(times[0]) - first_s), "startup")]
    # A segment ends with its last step: before a step of the other kind, and at the end.
    for place in [*np.flatnonzero(np.diff(lost)), len(times) - 1]:
        segments.append(Segment(segments[-1].end, float(times[place]), "lost" if lost[place] else "training"))
    return [*segments, Segment(segments[-1].end, attempt.end, attempt.tail)]


def _with_silence(segments: Sequence[Segment], events: Sequence[Record], train: Columns) -> list[Segment]:
    """If the run went silent, the time since its last sign of life counts as down."""
    kept = [segment for segment in segments if segment.end > segment.start]
    ended = any(event.get("kind") in ENDS for event in events[-1:])
    if not kept or ended or kept[-1].cause not in ("training", "startup"):
        return kept
    last = kept[-1]
    signs = [train.last("time"), *(number(event.get("time")) for event in events[-1:])]
    seen = max([sign for sign in signs if np.isfinite(sign)], default=last.start)
    if last.end - seen <= max(SILENT_S, SILENT_STEPS * usual_step_s(train)):
        return kept
    pieces = [Segment(last.start, seen, last.cause), Segment(seen, last.end, "down")]
    return kept[:-1] + [piece for piece in pieces if piece.end > piece.start]


def usual_step_s(train: Columns) -> float:
    """The median of the last steps; 0 if there is none."""
    recent = train.column("step_s")[-200:]
    return float(np.nanmedian(recent)) if np.isfinite(recent).any() else 0.0


def _attempts(events: Sequence[Record], times: FloatArray, now: float) -> list[_Attempt]:
    begins = [index for index, event in enumerate(events) if event.get("kind") in BEGINS]
    # A start (of the launcher) and the resume that follows it (of the trainer) are one attempt.
    begins = [b for i, b in enumerate(begins) if not i or _ended_between(events, begins[i - 1], b, times)]
    attempts: list[_Attempt] = []
    resumed_at = np.inf
    until = len(events)
    # Backwards: an attempt may resume from a step before the attempt that preceded it.
    for index in reversed(begins):
        within = events[index:until]
        begin = number(within[0].get("time"))
        ending = next((event for event in within if event.get("kind") in ENDS), None)
        if ending is not None:
            # Not always the latest time: the clock may have been set back during the attempt.
            end = max(number(event.get("time")) for event in within[: within.index(ending) + 1])
        elif until < len(events):
            end = _last_sign(times, within, number(events[until].get("time")))
        else:
            end = max(now, begin)
        clean = until == len(events) or (ending is not None and ending.get("kind") != "fault")
        attempts.append(_Attempt(begin, max(begin, end), resumed_at, "training" if clean else "lost"))
        resumed_at = min(resumed_at, _resume_step(within))
        until = index
    return attempts[::-1]


def _ended_between(events: Sequence[Record], before: int, after: int, times: FloatArray) -> bool:
    if events[after].get("kind") == "start" or any(event.get("kind") in ENDS for event in events[before:after]):
        return True
    start, end = np.searchsorted(times, (number(events[before].get("time")), number(events[after].get("time"))))
    return bool(end > start)


def _resume_step(within: Sequence[Record]) -> float:
    """The step that an attempt resumed from. An attempt from step 0 needs no event: its first line shows it."""
    for event in within:
        if event.get("kind") == "resume":
            return number(event.get("step") or 0)
        if event.get("kind") in ENDS:
            break
    return float(np.inf)


def _last_sign(times: FloatArray, within: Sequence[Record], before: float) -> float:
    """A killed attempt writes no end event: the time of its last line stands for it."""
    place = int(np.searchsorted(times, before))
    stepped = [float(times[place - 1])] if place else []
    return max([number(event.get("time")) for event in within] + stepped)


def _seconds(segments: Sequence[Segment], events: Sequence[Record], train: Columns) -> dict[str, float]:
    by_segment = {
        cause: sum(segment.end - segment.start for segment in segments if segment.cause == cause)
        for cause in ("training", "startup", "lost", "down")
    }
    counted = [segment for segment in segments if segment.cause == "training"]
    starts, ends = (np.array([getattr(segment, name) for segment in counted]) for name in ("start", "end"))

    stalls = [event for event in events if event.get("kind") in ("left", "joined")]

    def total(kind: str, key: str) -> float:
        return total_of([event for event in events if event.get("kind") == kind], key)

    def total_of(found: Sequence[Record], key: str) -> float:
        if not counted or not found:
            return 0.0
        times, values = (np.array([number(event.get(name)) for event in found]) for name in ("time", key))
        # A binary search, because a scrape must stay cheap in the process that trains.
        place = np.searchsorted(starts, times, side="right") - 1
        return float(np.nansum(values[(place >= 0) & (times <= ends[place])]))

    inside = {
        "data": float(np.nansum(train.column("data_s"))),
        "checkpoint": total("checkpoint_started", "blocked_s") + total("checkpoint_committed", "blocked_s"),
        "evaluate": total("evaluate", "seconds"),
        # Replicas that left or joined at the same step have delayed it together.
        "stall": total_of(list({event.get("step"): event for event in stalls}.values()), "stall_s"),
    }
    productive = max(0.0, by_segment.pop("training") - sum(inside.values()))
    return {"productive": productive, **inside, **by_segment}
