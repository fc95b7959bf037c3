"""Where the hours went: every second of a run's wall clock under one cause, from its events and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.observe.columns import Columns
from keepstep.observe.folder import Record, number

Cause = Literal["training", "startup", "lost", "down"]
CAUSES: dict[str, str] = {
    "productive": "steps that count",
    "data": "waiting for data",
    "checkpoint": "training held up by a save",
    "evaluate": "validation",
    "startup": "from the start of an attempt to its first step",
    "lost": "steps done and lost to a fault",
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
    """Step the next attempt went on from; infinite when nothing came after."""


def account(events: Sequence[Record], train: Columns, now: float) -> Goodput:
    """Split the run's wall clock. `now` counts only while the run has neither finished nor stopped."""
    attempts = _attempts(events, train, now)
    steps, times, step_s = (train.column(name) for name in ("step", "time", "step_s"))
    segments: list[Segment] = []
    for index, attempt in enumerate(attempts):
        if index and attempts[index - 1].end < attempt.begin:
            segments.append(Segment(attempts[index - 1].end, attempt.begin, "down"))
        first, last = np.searchsorted(times, attempt.begin), np.searchsorted(times, attempt.end, side="right")
        kept = int(min(last, np.searchsorted(steps, attempt.resumed_at, side="right")))
        if kept <= first:
            redone = attempt.resumed_at < np.inf and _has_fault(events, attempt)
            segments.append(Segment(attempt.begin, attempt.end, "lost" if redone else "startup"))
            continue
        took = step_s[first] if np.isfinite(step_s[first]) else 0.0
        stepping = float(max(attempt.begin, times[first] - took))
        # A clean stop loses nothing: what follows its last step is the save on request.
        solid = float(times[kept - 1]) if kept < last or attempt.resumed_at < np.inf else attempt.end
        segments.append(Segment(attempt.begin, stepping, "startup"))
        segments.append(Segment(stepping, solid, "training"))
        segments.append(Segment(solid, attempt.end, "lost"))
    segments = [*_silence(segments, events, train)]
    return Goodput(_seconds(segments, events, train), segments)


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


def _attempts(events: Sequence[Record], train: Columns, now: float) -> list[_Attempt]:
    begins = [index for index, event in enumerate(events) if event.get("kind") in BEGINS]
    # A resume that follows its own start (the launcher's, then the trainer's) is one attempt, not two.
    begins = [b for i, b in enumerate(begins) if not i or _ended_between(events, begins[i - 1], b, train)]
    attempts: list[_Attempt] = []
    for place, index in enumerate(begins):
        until = begins[place + 1] if place + 1 < len(begins) else len(events)
        within = events[index:until]
        begin = number(within[0].get("time"))
        ends = [number(event.get("time")) for event in within if event.get("kind") in ENDS]
        if until < len(events):
            following = events[until:]
            resumed_at = _resume_step(following)
            next_begin = number(following[0].get("time"))
            end = ends[0] if ends else _last_sign(train, within, next_begin)
        else:
            resumed_at = np.inf
            end = ends[0] if ends else max(now, begin)
        attempts.append(_Attempt(begin, max(begin, end), resumed_at))
    return attempts


def _ended_between(events: Sequence[Record], before: int, after: int, train: Columns) -> bool:
    if events[after].get("kind") == "start" or any(event.get("kind") in ENDS for event in events[before:after]):
        return True
    times = train.column("time")
    start, end = np.searchsorted(times, (number(events[before].get("time")), number(events[after].get("time"))))
    return bool(end > start)


def _resume_step(following: Sequence[Record]) -> float:
    for event in following:
        if event.get("kind") == "resume":
            return number(event.get("step") or 0)
        if event.get("kind") in ENDS:
            break
    return 0.0


def _last_sign(train: Columns, within: Sequence[Record], before: float) -> float:
    """An attempt that was killed outright tells no end: its last line is the last we know of it."""
    times = train.column("time")
    place = int(np.searchsorted(times, before))
    stepped = [float(times[place - 1])] if place else []
    return max([number(event.get("time")) for event in within] + stepped)


def _has_fault(events: Sequence[Record], attempt: _Attempt) -> bool:
    return any(
        event.get("kind") == "fault" and attempt.begin <= number(event.get("time")) <= attempt.end for event in events
    )


def _seconds(segments: Sequence[Segment], events: Sequence[Record], train: Columns) -> dict[str, float]:
    by_segment = {
        cause: sum(segment.end - segment.start for segment in segments if segment.cause == cause)
        for cause in ("training", "startup", "lost", "down")
    }
    counted = [(segment.start, segment.end) for segment in segments if segment.cause == "training"]

    def told(kind: str, key: str) -> float:
        values = [
            number(event.get(key))
            for event in events
            if event.get("kind") == kind and any(start <= number(event.get("time")) <= end for start, end in counted)
        ]
        return float(np.nansum(values)) if values else 0.0

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
