"""How far the run is, and when something is due: steps, samples, tokens, epochs and seconds in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.core.units import Duration, Pace


@dataclass
class Clock:
    """Counts of finished work; saved with every checkpoint."""

    pace: Pace
    step: int = 0
    samples: int = 0
    """Global samples consumed: the data position, right even where a resumed run changes its batch size."""
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, global_batch: int, seq_len: int, samples_per_epoch: int) -> Clock:
        """A clock at the beginning of a run."""
        return cls(Pace(global_batch, seq_len, samples_per_epoch))

    @property
    def tokens(self) -> int:
        """Global tokens consumed."""
        return self.samples * self.pace.tokens_per_sample

    def advance(self, step_s: float, samples: int | None = None) -> None:
        """One step is done. The data position is `samples` then: more than one step further where some were skipped."""
        self.step += 1
        self.samples = self.samples + self.pace.samples_per_step if samples is None else samples
        self.elapsed_s += step_s

    def reached(self, duration: Duration) -> bool:
        """Whether the run is at or past `duration`."""
        steps = self.pace.steps(duration)
        return self.elapsed_s >= duration.value if steps is None else self.steps_towards(duration) >= steps

    def steps_towards(self, duration: Duration) -> int:
        """Steps of `duration` that are done; for a duration in data, the steps of today's size that it would take.

        The two differ where a resumed run changed its batch size, or samples were skipped.
        """
        return self.step if duration.unit in ("ba", "s") else self.samples // self.pace.samples_per_step

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"step": self.step, "samples": self.samples, "elapsed_s": self.elapsed_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's numbers."""
        self.step = int(state["step"])
        self.samples = int(state["samples"])
        self.elapsed_s = float(state["elapsed_s"])


class Interval:
    """When something that recurs is due. `0ba` means never."""

    def __init__(self, every: Duration, clock: Clock) -> None:
        self._every = every
        self._clock = clock
        self._last = self._count()

    def _count(self) -> int:
        if not self._every.value:
            return 0
        steps = self._clock.pace.steps(self._every)
        if steps is None:
            return int(self._clock.elapsed_s // self._every.value)
        return self._clock.step // max(1, steps)

    def due(self) -> bool:
        """True once each time the interval has passed since the last True."""
        count = self._count()
        passed, self._last = count > self._last, count
        return passed

    def falls_on_this_step(self) -> bool:
        """Whether it is due at the step just done; never for durations in seconds."""
        steps = self._clock.pace.steps(self._every) if self._every.value else None
        return steps is not None and self._clock.step > 0 and self._clock.step % max(1, steps) == 0

    def retry(self) -> None:
        """What was due could not be done: be due again at the next step."""
        self._last -= 1
