"""Where the hours went: every second of a run's wall clock under one cause, from its events and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.observe.columns import Columns, FloatArray
from keepstep.observe.folder import Record, number

Cause = Literal["training", "startup", "lost", "down"]
CAUSES: dict[str, str] = {
    "productive": "steps that count",
    "data": "waiting for data",
    "checkpoint": "training held up by a save",
    "evaluate": "validation and samples",
    "startup": "from the start of an attempt to its first step",
    "lost": "steps done and gone back from",
    "down": "nothing ran",
}
"""What the wall clock is split into, in the order it is shown."""
BEGINS = ("start", "resume")
ENDS = ("fault", "stop", "finish")
SILENT_S = 60.0
SILENT_STEPS = 20.0
"""A run is silent after both, a minute and the time of twenty steps."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the timeline."""

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
        """From the first start to the end, or to now."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of the wall clock, how much went into steps that count; 0 before there is any."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True)
class _Attempt:
    begin: float
    end: float
    resumed_at: float
    """Step that a later attempt went on from; infinite when none did, or none has told yet."""
    tail: Cause
    """What the time after its last step is: a save on request, or a step that was never done."""


def account(events: Sequence[Record], train: Columns, undone: Columns, now: float) -> Goodput:
    """Split the run's wall clock. `now` counts only while the run has neither finished nor stopped.

    `undone` are the steps that were done and then gone back from: they ran, but count as lost.
    """
    steps = _Steps.of(train, undone)
    attempts = _attempts(events, steps.times, now)
    segments: list[Segment] = []
    for index, attempt in enumerate(attempts):
        if index and attempts[index - 1].end < attempt.begin:
            segments.append(Segment(attempts[index - 1].end, attempt.begin, "down"))
        segments += _attempt_segments(attempt, steps)
    segments = [*_silence(segments, events, train)]
    return Goodput(_seconds(segments, events, train), segments)


@dataclass(frozen=True)
class _Steps:
    """Every step that was ever done, by time: when it ended, its number (infinite once undone) and its seconds."""

    times: FloatArray
    numbers: FloatArray
    took_s: FloatArray

    @classmethod
    def of(cls, train: Columns, undone: Columns) -> _Steps:
        numbers = np.concatenate([train.column("step"), np.full(len(undone), np.inf)])
        times, took_s = (np.concatenate([train.column(name), undone.column(name)]) for name in ("time", "step_s"))
        if not len(undone):
            return cls(times, numbers, took_s)
        order = np.argsort(times, kind="stable")
        return cls(times[order], numbers[order], took_s[order])


def _attempt_segments(attempt: _Attempt, steps: _Steps) -> list[Segment]:
    """Startup, then training and lost in turns: a run that goes back by itself loses steps in the midst of one."""
    first = int(np.searchsorted(steps.times, attempt.begin))
    inside = slice(first, int(np.searchsorted(steps.times, attempt.end, side="right")))
    times, took_s, numbers = steps.times[inside], steps.took_s[inside], steps.numbers[inside]
    if not len(times):
        return [Segment(attempt.begin, attempt.end, "startup")]
    lost = (numbers > attempt.resumed_at) | np.isinf(numbers)
    first_s = float(took_s[0]) if np.isfinite(took_s[0]) else 0.0
    segments = [Segment(attempt.begin, max(attempt.begin, float(times[0]) - first_s), "startup")]
    # A stretch ends with its last step: where the next one is of the other kind, and at the end.
    for place in [*np.flatnonzero(np.diff(lost)), len(times) - 1]:
        segments.append(Segment(segments[-1].end, float(times[place]), "lost" if lost[place] else "training"))
    return [*segments, Segment(segments[-1].end, attempt.end, attempt.tail)]


def _silence(segments: Sequence[Segment], events: Sequence[Record], train: Columns) -> list[Segment]:
    """An open end that has gone silent is down time from the last sign of life on, not training."""
    kept = [segment for segment in segments if segment.end > segment.start]
    ended = any(event.get("kind") in ENDS for event in events[-1:])
    if not kept or ended or kept[-1].cause not in ("training", "startup"):
        return kept
    last = kept[-1]
    signs = [train.last("time"), *(number(event.get("time")) for event in events[-1:])]
    seen = max([sign for sign in signs if np.isfinite(sign)], default=last.start)
    recent = train.column("step_s")[-200:]
    usual_s = float(np.nanmedian(recent)) if np.isfinite(recent).any() else 0.0
    if last.end - seen <= max(SILENT_S, SILENT_STEPS * usual_s):
        return kept
    pieces = [Segment(last.start, seen, last.cause), Segment(seen, last.end, "down")]
    return kept[:-1] + [piece for piece in pieces if piece.end > piece.start]


def _attempts(events: Sequence[Record], times: FloatArray, now: float) -> list[_Attempt]:
    begins = [index for index, event in enumerate(events) if event.get("kind") in BEGINS]
    # A resume that follows its own start (the launcher's, then the trainer's) is one attempt, not two.
    begins = [b for i, b in enumerate(begins) if not i or _ended_between(events, begins[i - 1], b, times)]
    attempts: list[_Attempt] = []
    resumed_at = np.inf
    until = len(events)
    # From the newest back: an attempt may go on from before the one that came before it.
    for index in reversed(begins):
        within = events[index:until]
        begin = number(within[0].get("time"))
        told = next((event for event in within if event.get("kind") in ENDS), None)
        if told is not None:
            end = number(told.get("time"))
        elif until < len(events):
            end = _last_sign(times, within, number(events[until].get("time")))
        else:
            end = max(now, begin)
        clean = until == len(events) or (told is not None and told.get("kind") != "fault")
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
    """Where an attempt went on from. One that began anew needs no telling: its first line undoes all before it."""
    for event in within:
        if event.get("kind") == "resume":
            return number(event.get("step") or 0)
        if event.get("kind") in ENDS:
            break
    return float(np.inf)


def _last_sign(times: FloatArray, within: Sequence[Record], before: float) -> float:
    """An attempt that was killed outright tells no end: its last line is the last we know of it."""
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

    def told(kind: str, key: str) -> float:
        of_kind = [event for event in events if event.get("kind") == kind]
        if not counted or not of_kind:
            return 0.0
        times, values = (np.array([number(event.get(name)) for event in of_kind]) for name in ("time", key))
        # Looked up and not compared one by one: a scrape must stay cheap in the process that trains.
        place = np.searchsorted(starts, times, side="right") - 1
        return float(np.nansum(values[(place >= 0) & (times <= ends[place])]))

    inside = {
        "data": float(np.nansum(train.column("data_s"))),
        "checkpoint": told("checkpoint_started", "blocked_s") + told("checkpoint_committed", "blocked_s"),
        "evaluate": told("evaluate", "seconds"),
    }
    productive = max(0.0, by_segment["training"] - sum(inside.values()))
    return {
        "productive": productive,
        **inside,
        "startup": by_segment["startup"],
        "lost": by_segment["lost"],
        "down": by_segment["down"],
    }
