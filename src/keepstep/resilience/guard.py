"""Whether a step's numbers can be trusted, and what to do where they cannot. Pure: numbers in, a verdict out.

All processes read the same loss, so all of them come to the same verdict without a message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Literal

from keepstep.config.schema import GuardConfig
from keepstep.core.errors import DivergedError

ENOUGH = 16
"""Numbers that a median needs before anything is judged by it."""
LEAST_DEVIATION = 0.01
"""Share of the median that counts as deviation where losses hardly vary: else every ripple would be a spike."""


@dataclass(frozen=True)
class Reading:
    """The numbers of one step, and the samples it was computed from."""

    step: int
    loss: float
    norm: float
    first_sample: int
    count: int
    targets: int = 1
    """Tokens that the loss is a mean of."""

    def __str__(self) -> str:
        if not self.targets:
            return f"step {self.step}: no token of its samples has a target"
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.norm:.4g}"

    def facts(self) -> dict[str, int | float]:
        """For an event."""
        return {
            "step": self.step,
            "loss": self.loss,
            "norm": self.norm,
            "first_sample": self.first_sample,
            "count": self.count,
        }


@dataclass(frozen=True)
class Verdict:
    """What was found, and what is to be done."""

    what: Literal["good", "nan", "spike", "no targets"] = "good"
    action: Literal["go_on", "retry", "skip", "rollback"] = "go_on"


class Guard:
    """Told every step's numbers in turn. `scaled` losses (fp16) overflow now and then: their norms are not judged."""

    def __init__(self, config: GuardConfig, *, scaled: bool = False) -> None:
        self._config = config
        self._scaled = scaled
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._read = 0
        self._acted: deque[int] = deque()
        self._retried = -1

    def judge(self, reading: Reading) -> Verdict:
        """What to do about a step; DivergedError where the run must end."""
        self._read += 1
        verdict = self._verdict(reading)
        if verdict.what == "good":
            self._losses.append(reading.loss)
        if verdict.action != "go_on":
            self._count(reading)
        return verdict

    def outlier(self, reading: Reading) -> float | None:
        """The median norm where this step's is far above it, else None. Asked once a step."""
        if not isfinite(reading.norm):
            return None
        usual = median(self._norms) if len(self._norms) >= min(ENOUGH, self._config.window) else None
        self._norms.append(reading.norm)
        factor = self._config.outlier_factor
        return usual if factor and usual is not None and reading.norm > factor * usual else None

    def _verdict(self, reading: Reading) -> Verdict:
        if not reading.targets:
            # A mean of nothing is no number, and will be none again: the samples are to blame, not the weights.
            return Verdict("no targets", "skip")
        if not isfinite(reading.loss) or not (self._scaled or isfinite(reading.norm)):
            if self._config.nan == "stop":
                raise DivergedError(f"{_spelled(reading)}: the weights saved before it are still good", _REMEDY)
            if self._config.nan == "retry":
                again = reading.step == self._retried
                self._retried = reading.step
                return Verdict("nan", "skip" if again else "retry")
            return Verdict("nan", self._config.nan)
        if self._config.spike == "rollback" and self._is_spike(reading.loss):
            return Verdict("spike", "rollback")
        return Verdict()

    def _is_spike(self, loss: float) -> bool:
        if len(self._losses) < min(ENOUGH, self._config.window):
            return False
        middle = median(self._losses)
        deviation = median(abs(each - middle) for each in self._losses)
        return loss > middle + self._config.spike_factor * max(deviation, LEAST_DEVIATION * abs(middle))

    def _count(self, reading: Reading) -> None:
        self._acted.append(self._read)
        while self._acted[0] <= self._read - self._config.window:
            self._acted.popleft()
        if len(self._acted) > self._config.limit:
            raise DivergedError(
                f"{_spelled(reading)}, and {len(self._acted)} of the last {min(self._read, self._config.window)} "
                f"steps went wrong: guard.limit allows {self._config.limit}",
                _REMEDY if reading.targets else _NO_TARGETS_REMEDY,
            )


_REMEDY = "lower optimizer.lr or lengthen schedule.warmup, then start again from an earlier checkpoint"

_NO_TARGETS_REMEDY = (
    "what is learnt may lie behind model.seq_len: `keepstep data show` marks it; lengthen that, or take a larger "
    "global_batch"
)


def _spelled(reading: Reading) -> str:
    if not reading.targets:
        return f"no token of the samples of step {reading.step} has a target"
    return f"the loss is {reading.loss} at step {reading.step}, the gradient norm {reading.norm}"
