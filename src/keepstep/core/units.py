"""Quantities with units: durations of a run (`100ba`, `2ep`, `1e9tok`, `30min`), also in steps, and sizes (`64GiB`).

A bare number is an error where a unit is needed: `1000` steps and `1000` tokens are different runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

DurationUnit = Literal["ba", "ep", "tok", "sp", "s", "dur"]

_NUMBER = r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
_DURATION = re.compile(rf"^\s*{_NUMBER}\s*(ba|ep|tok|sp|s|min|h|dur|d)\s*$")
_SIZE = re.compile(rf"^\s*{_NUMBER}\s*(B|[kKMGTP]B|[KMGTP]iB|[KMGTP]i)\s*$")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_POWERS = {"K": 1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True)
class Duration:
    """A length of a run: steps (ba), epochs (ep), tokens (tok), samples (sp), seconds (s to d) or a share (dur)."""

    value: float
    unit: DurationUnit

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read `100ba`. Raises a ValueError with the reason."""
        match = _DURATION.match(text)
        if not match:
            raise ValueError(
                "needs a number and a unit: 100ba (steps), 2ep, 1e9tok, 500sp, 30s, 10min, 2h, 1d, 0.02dur (of the run)"
            )
        value, unit = float(match[1].replace("_", "")), match[2]
        if unit in _SECONDS:
            return cls(value * _SECONDS[unit], "s")
        if unit not in ("ep", "dur") and value != int(value):
            raise ValueError(f"must be a whole number of {unit}")
        return cls(value, unit)  # type: ignore[arg-type]

    def share_of(self, whole: Duration) -> Duration:
        """A `dur` as a length of its own, in the unit of the whole run; any other duration is unchanged."""
        if self.unit != "dur":
            return self
        value = self.value * whole.value
        # Not 21 steps for 0.02 of 1000, only because 0.02 is not exact in binary.
        return Duration(value if whole.unit in ("ep", "s") else math.ceil(round(value, 6)), whole.unit)

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{number}{self.unit}"


@dataclass(frozen=True)
class Pace:
    """What one step consumes. It is the same for the whole run, with any number of processes."""

    samples_per_step: int
    tokens_per_sample: int
    samples_per_epoch: int

    def steps(self, duration: Duration) -> int | None:
        """`duration` in steps, rounded up; None for wall-clock time."""
        if duration.unit == "s":
            return None
        if duration.unit == "ep":
            return -(-round(duration.value * self.samples_per_epoch) // self.samples_per_step)
        per_step = {"ba": 1, "sp": self.samples_per_step, "tok": self.samples_per_step * self.tokens_per_sample}
        return -(-int(duration.value) // per_step[duration.unit])


@dataclass(frozen=True)
class ByteSize:
    """A number of bytes, written `64GiB` (powers of 1024) or `64GB` (powers of 1000)."""

    bytes: int

    @classmethod
    def parse(cls, text: str) -> ByteSize:
        """Read `1.5GiB`. Raises a ValueError with the reason."""
        match = _SIZE.match(text)
        if not match:
            raise ValueError("needs a number and a unit: 512MiB, 64GiB, 2TB")
        value, unit = float(match[1].replace("_", "")), match[2]
        if unit == "B":
            return cls(int(value))
        base = 1024 if "i" in unit else 1000
        return cls(int(value * base ** _POWERS[unit[0]]))

    def __str__(self) -> str:
        for power, prefix in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "K")):
            if self.bytes and self.bytes % 1024**power == 0:
                return f"{self.bytes // 1024**power}{prefix}iB"
        return f"{self.bytes}B"


def format_bytes(size: float) -> str:
    """For people: `1.5 GiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """For people: `42s`, `3m12s`, `2h05m`, `3d04h`; `–` for NaN."""
    if math.isnan(seconds):
        return "–"
    whole = round(max(-1e12, min(seconds, 1e12)))  # a damaged record may say infinity
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_count(count: float) -> str:
    """For people: `12.3k`, `1.24M`, `8.03B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"
