"""Decide whether the loss and gradient norm of a step can be trusted, and what to do if not. Pure functions of numbers.

All processes read the same loss, so they reach the same verdict without communication.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from typing import Literal

from keepstep.config.schema import GuardConfig
from keepstep.core.errors import DivergedError

MIN_SAMPLES = 16
"""Values that a median needs before it is used."""
MIN_DEVIATION = 0.01
"""Lower bound of the deviation, as a share of the median: where losses hardly vary, small changes are not spikes."""


@dataclass(frozen=True)
class Reading:
    """The loss and gradient norm of one step, and its samples."""

    step: int
    loss: float
    norm: float
    first_sample: int
    count: int
    targets: int = 1
    """Tokens that the loss is averaged over."""

    def __str__(self) -> str:
        if not self.targets:
            return f"step {self.step}: no token of its samples has a target"
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.norm:.4g}"

    def facts(self) -> dict[str, int | float]:
        """For an event."""
        return {name: value for name, value in asdict(self).items() if name != "targets"}


@dataclass(frozen=True)
class Verdict:
    """What was found, and what to do about it."""

    what: Literal["good", "nan", "spike", "no targets"] = "good"
    action: Literal["continue", "retry", "skip", "rollback"] = "continue"


class Guard:
    """Judges the steps of a run in order. With `scaled` losses (fp16) norms overflow at times and are not judged."""

    def __init__(self, config: GuardConfig, *, scaled: bool = False) -> None:
        self._config = config
        self._scaled = scaled
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._read = 0
        self._acted: deque[int] = deque()
        self._retried = -1

    def judge(self, reading: Reading) -> Verdict:
        """What to do about a step; DivergedError if the run must end."""
        self._read += 1
        verdict = self._verdict(reading)
        if verdict.what == "good":
            self._losses.append(reading.loss)
        if verdict.action != "continue":
            self._count(reading)
        return verdict

    def outlier(self, reading: Reading) -> float | None:
        """The median norm if this step's norm is far above it, else None. Call it once per step."""
        if not isfinite(reading.norm):
            return None
        usual = median(self._norms) if len(self._norms) >= min(MIN_SAMPLES, self._config.window) else None
        self._norms.append(reading.norm)
        factor = self._config.outlier_factor
        return usual if factor and usual is not None and reading.norm > factor * usual else None

    def _verdict(self, reading: Reading) -> Verdict:
        if not reading.targets:
            # A mean over no tokens is NaN every time: the samples are the cause, not the weights.
            return Verdict("no targets", "skip")
        if not isfinite(reading.loss) or not (self._scaled or isfinite(reading.norm)):
            if self._config.nan == "stop":
                raise DivergedError(f"{_describe(reading)}: the weights saved before it are still good", _HINT)
            if self._config.nan == "retry":
                again = reading.step == self._retried
                self._retried = reading.step
                return Verdict("nan", "skip" if again else "retry")
            return Verdict("nan", self._config.nan)
        if self._config.spike == "rollback" and self._is_spike(reading.loss):
            return Verdict("spike", "rollback")
        return Verdict()

    def _is_spike(self, loss: float) -> bool:
        if len(self._losses) < min(MIN_SAMPLES, self._config.window):
            return False
        middle = median(self._losses)
        deviation = median(abs(each - middle) for each in self._losses)
        return loss > middle + self._config.spike_factor * max(deviation, MIN_DEVIATION * abs(middle))

    def _count(self, reading: Reading) -> None:
        self._acted.append(self._read)
        while self._acted[0] <= self._read - self._config.window:
            self._acted.popleft()
        if len(self._acted) > self._config.limit:
            raise DivergedError(
                f"{_describe(reading)}, and {len(self._acted)} of the last {min(self._read, self._config.window)} "
                f"steps went wrong: guard.limit allows {self._config.limit}",
                _HINT if reading.targets else _NO_TARGETS_HINT,
            )


_HINT = "lower optimizer.lr or lengthen schedule.warmup, then start again from an earlier checkpoint"

_NO_TARGETS_HINT = (
    "the trained tokens may be beyond model.seq_len (`keepstep data show` marks them): "
    "increase model.seq_len or global_batch"
)


def _describe(reading: Reading) -> str:
    if not reading.targets:
        return f"no token of the samples of step {reading.step} has a target"
    return f"the loss is {reading.loss} at step {reading.step}, the gradient norm {reading.norm}"
