"""Rules across fields: functions that name their fields by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.config.schema import RunConfig

Found = tuple[str, str | None] | None
"""What a rule returns: None where it holds, else the rule (read after "but it") and a hint."""


@dataclass(frozen=True)
class Rule:
    """A check and the fields it reads. The first one is the field that a message names."""

    fields: tuple[str, ...]
    find: Callable[[RunConfig], Found]


def rule(*fields: str) -> Callable[[Callable[[RunConfig], Found]], Rule]:
    """Make a function a rule about `fields`. It is skipped where one of them is invalid by itself."""
    return lambda find: Rule(fields, find)


def divisors(number: int) -> list[int]:
    """All divisors in order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def around(choices: list[int], wanted: int) -> list[int]:
    """The nearest choice on each side of `wanted`."""
    below = [each for each in choices if each <= wanted][-1:]
    above = [each for each in choices if each > wanted][:1]
    return below + above


def multiples_around(step: int, wanted: int) -> list[int]:
    """The nearest multiples of `step` on each side of `wanted`."""
    below = wanted // step * step
    return [below, below + step] if below > 0 else [step]


def is_positive(value: Any) -> bool:
    """Whether a value from a free mapping is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
