"""Scores of the Berkeley Function Calling Leaderboard before and after a run, as `keepstep eval bfcl` leaves them.

With them what `keepstep data check` found of the benchmark in the training data.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.files import read_regular
from keepstep.observe.run_folder import Record, RunFolder, number

SUMMARIES = ("non_live_ast", "live_ast", "irrelevance", "relevance", "multi_turn_base")
"""The leaderboard's columns."""
DATA_CHECK = "data-check.json"
"""The report of `keepstep data check`, in the folder of the scores."""
_MISSING = "–"


@dataclass(frozen=True)
class Leaderboard:
    """A row for each score and a column for each evaluation: first the weights that the run started from."""

    heads: list[str]
    rows: list[list[str]]


def leaderboard(folder: RunFolder) -> Leaderboard:
    """The evaluations in a run's folder; without rows if there are none."""
    found = sorted(_reports(folder.bfcl), key=lambda item: item[:2])
    reports = [report for _, _, report in found]
    categories: list[dict[str, Any]] = [report["categories"] for report in reports]
    rows = [[name.replace("_", " "), *(_percent(report.get(name)) for report in reports)] for name in SUMMARIES]
    for name in dict.fromkeys(name for scores in categories for name in scores):
        rows.append([f"· {name}", *(_percent(scores.get(name, {}).get("accuracy")) for scores in categories)])
    counts = [sum(number(score["count"]) for score in scores.values()) for scores in categories]
    rows.append(["questions", *(f"{count:,.0f}" for count in counts)])
    known = [row for row in rows if set(row[1:]) - {_MISSING}]
    heads = [head for _, head, _ in found]
    if check := _data_check(folder.bfcl):
        heads = heads or ["training data"]
        known += [[name, count, *[""] * (len(heads) - 1)] for name, count in check]
    return Leaderboard(["", *heads], known)


def _reports(folder: Path) -> list[tuple[int, str, Record]]:
    """Step (-1 for the start), heading and numbers of each evaluation; damaged files are skipped."""
    found = []
    # A link may lead away from the run.
    for path in () if folder.is_symlink() else folder.glob("*.json"):
        named = re.fullmatch(r"(start|step-(\d{1,15}))-(native|prompt)", path.stem)
        if named and (report := _report(path)):
            step = int(named[2] or -1)
            found.append((step, f"{f'step {step:,}' if named[2] else 'start'}, {named[3]}", report))
    return found


def _report(path: Path) -> Record | None:
    try:
        report: Record = json.loads(read_regular(path, 2**20))
        numbers = [number(score[key]) for score in report["categories"].values() for key in ("accuracy", "count")]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return report if all(map(math.isfinite, numbers)) else None


def _data_check(folder: Path) -> list[tuple[str, str]]:
    """How many training rows were compared with the benchmark, and how many have something of it."""
    try:
        report: Record = json.loads("" if folder.is_symlink() else read_regular(folder / DATA_CHECK, 2**20))
        rows, contaminated = (number(report[key]) for key in ("rows", "contaminated_rows"))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    if not math.isfinite(rows + contaminated):
        return []
    return [("training rows compared", f"{rows:,.0f}"), ("with something of the benchmark", f"{contaminated:,.0f}")]


def _percent(share: Any) -> str:
    return f"{number(share):.2%}" if math.isfinite(number(share)) else _MISSING
