"""The range of a number, declared at its field: `layers: PositiveInt = 12`.

The check at load time, its error message, the reference page and the JSON Schema all read this one declaration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from keepstep.core.units import ByteSize, Duration


@dataclass(frozen=True)
class Range:
    """Bounds of a number, of a duration or size (in its own unit), or of every number in a list."""

    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    or_equal: float | None = None
    """One value outside the bounds that is allowed as well, for example -1 for "choose for me"."""
    word: str = ""
    """What users write and see in place of `or_equal`, or of None where that is not set: `auto`."""
    limit: int | None = None
    """An upper bound far above any use, named only where it is broken: what is computed from the number (divisors,
    layers, bytes) ends in time."""

    def holds(self, value: Any) -> bool:
        """Whether `value` is inside."""
        if isinstance(value, tuple):
            return all(self.holds(item) for item in value)
        number = value.value if isinstance(value, Duration) else value.bytes if isinstance(value, ByteSize) else value
        if number is None or (self.or_equal is not None and number == self.or_equal):
            return True
        # NaN fails every comparison, so each bound is written as what must be true.
        return (
            (self.min is None or number >= self.min)
            and (self.above is None or number > self.above)
            and (self.max is None or number <= self.max)
            and (self.below is None or number < self.below)
            and (self.limit is None or number <= self.limit)
        )

    def rule(self, value: Any) -> str:
        """What a value outside breaks, read after "but it"."""
        return f"{'must have every value' if isinstance(value, tuple) else 'must be'} {self.describe(value)}"

    def describe(self, value: Any) -> str:
        """The bounds for values like `value`: `at least 0 and below 1`."""
        too_large = self.limit is not None and isinstance(value, int) and value > self.limit
        most = self.limit if too_large else self.max
        words = {"at least": self.min, "above": self.above, "at most": most, "below": self.below}
        bounds = " and ".join(
            f"{word} {ByteSize(int(bound)) if isinstance(value, ByteSize) else f'{bound:.17g}'}"
            for word, bound in words.items()
            if bound is not None
        )
        other = self.word or (f"{self.or_equal:.17g}" if self.or_equal is not None else "")
        return ", ".join(filter(None, (bounds, other and f"or {other}")))

    def read(self, value: Any) -> Any:
        """The number that a word stands for; other values unchanged."""
        return self.or_equal if self.word and value == self.word else value

    def shown(self, value: Any) -> Any:
        """The word that users write for a number; other values unchanged."""
        return self.word if self.word and value == self.or_equal else value

    def json_schema(self) -> dict[str, float]:
        """The bounds as keywords of JSON Schema."""
        words = {"minimum": self.min, "exclusiveMinimum": self.above, "maximum": self.max}
        words["exclusiveMaximum"] = self.below
        return {word: bound for word, bound in words.items() if bound is not None}


PositiveIntOrAuto = Annotated[int, Range(above=0, or_equal=0, word="auto", limit=10**12)]
BoolOrAuto = Annotated[bool | None, Range(word="auto")]
PositiveInt = Annotated[int, Range(above=0, limit=10**12)]
NonNegativeInt = Annotated[int, Range(min=0, limit=10**12)]
ModelSize = Annotated[int, Range(above=0, limit=2**24)]
ModelSizeOrZero = Annotated[int, Range(min=0, limit=2**24)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(min=0)]
Fraction = Annotated[float, Range(min=0, max=1)]
FractionBelowOne = Annotated[float, Range(min=0, below=1)]
PositiveDuration = Annotated[Duration, Range(above=0)]
NonNegativeDuration = Annotated[Duration, Range(min=0)]
