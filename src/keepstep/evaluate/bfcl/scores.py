"""Scores as the leaderboard computes them, and its table.

Non-live AST is the mean of simple, multiple, parallel and parallel multiple, where simple is the mean of the three
languages. Live AST weighs its categories by their rows. Irrelevance is the mean of the live and the non-live category.
A summary is missing while one of its categories has no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.evaluate.bfcl.benchmark import CATEGORIES


@dataclass
class CategoryScore:
    """Counts of one category."""

    count: int = 0
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.count


def score(verdicts: Iterable[Mapping[str, Any]]) -> dict[str, CategoryScore]:
    """Counts by category, of lines with `category` and `error`."""
    found: dict[str, CategoryScore] = {}
    for line in verdicts:
        result = found.setdefault(line["category"], CategoryScore())
        result.count += 1
        result.right += line["error"] is None
        if line["error"]:
            result.errors[line["error"]] += 1
    return {name: found[name] for name in CATEGORIES if name in found}


def summaries(scores: Mapping[str, CategoryScore]) -> dict[str, float | None]:
    """The columns of the leaderboard that follow from these categories."""

    def mean(*parts: float | None) -> float | None:
        known = [part for part in parts if part is not None]
        return sum(known) / len(parts) if len(known) == len(parts) else None

    def one(name: str) -> float | None:
        return scores[name].accuracy if name in scores else None

    def weighted(*names: str) -> float | None:
        parts = [scores[name] for name in names if name in scores]
        return (
            sum(part.right for part in parts) / sum(part.count for part in parts) if len(parts) == len(names) else None
        )

    simple = mean(one("simple_python"), one("simple_java"), one("simple_javascript"))
    return {
        "non_live_ast": mean(simple, one("multiple"), one("parallel"), one("parallel_multiple")),
        "live_ast": weighted("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
        "irrelevance": mean(one("irrelevance"), one("live_irrelevance")),
        "relevance": one("live_relevance"),
        "multi_turn_base": one("multi_turn_base"),
    }


def as_json(scores: Mapping[str, CategoryScore]) -> dict[str, Any]:
    """Summaries and categories as plain numbers; shares are from 0 to 1."""
    categories = {
        name: {"count": item.count, "right": item.right, "accuracy": item.accuracy, "errors": dict(item.errors)}
        for name, item in scores.items()
    }
    return {**summaries(scores), "categories": categories}


def table(scores: Mapping[str, CategoryScore]) -> str:
    """The summaries in the leaderboard's order, then each category with its most frequent errors."""
    lines = [f"{name.replace('_', ' '):<26}{_percent(share):>18}" for name, share in summaries(scores).items()]
    lines += ["", f"{'category':<26}{'right':>9}{'accuracy':>9}  errors"]
    for name, item in scores.items():
        errors = ", ".join(f"{error} {count}" for error, count in item.errors.most_common(3)) or "none"
        lines.append(f"{name:<26}{item.right:>4}/{item.count:<4}{_percent(item.accuracy):>9}  {errors}")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
