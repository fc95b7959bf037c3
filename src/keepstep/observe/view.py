"""What viewers show of a run or of two, as plain values, for the page, the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from keepstep.config.parse import Problems, read_yaml
from keepstep.config.values import plain
from keepstep.observe.columns import Columns, FloatArray, downsample, smooth
from keepstep.observe.goodput import CAUSES, account
from keepstep.observe.history import History
from keepstep.observe.leaderboard import leaderboard
from keepstep.observe.run_folder import Record, RunFolder, number
from keepstep.observe.verdict import Verdict, judge, own_seconds

_OBJECTIVES = ("reward_mean", "reward_margin", "reward_accuracy", "kl", "response_length")
_EXPERTS = ("expert_load_max", "expert_load_entropy")
_NOISY = ("loss", "grad_norm", "tokens_per_s", "mfu", "step_s", *_OBJECTIVES, *_EXPERTS)
SERIES = (*_NOISY, "lr", "memory_gib")
SPLIT = ("data", "compute", "communication", "save")
"""The parts of a step, in stacking order."""
SMOOTHED = frozenset((*_NOISY, *(f"split.{part}" for part in SPLIT)))
"""Noisy series. All others (validation, learning rate, memory) are drawn as they were recorded."""
_EVENTS_SHOWN = 400


def overview(history: History, now: float) -> dict[str, Any]:
    """Verdict, goodput, timeline, ranks, data position, samples and evaluations of one run."""
    verdict = judge(history, now)
    goodput = account(history, now)
    train, ranks = history.train, history.newest_ranks()
    return {
        "name": history.folder.name,
        "verdict": asdict(verdict),
        "now": {name: train.last(name) for name in train.names},
        "goodput": {
            "share": goodput.share,
            "wall_s": goodput.wall_s,
            "seconds": goodput.seconds,
            "causes": CAUSES,
            "segments": [[segment.start, segment.end, segment.cause] for segment in goodput.segments],
        },
        "events": history.events[-_EVENTS_SHOWN:],
        "events_total": len(history.events),
        "ranks": {**ranks, "own_s": own_seconds(ranks)},
        "sources": history.sources,
        "samples": history.newest_samples(),
        "evaluations": evaluations(history.valid),
        "leaderboard": asdict(leaderboard(history.folder)),
        "facts": history.facts(),
    }


def damaged(folder: RunFolder, error: Exception) -> dict[str, Any]:
    """The row of a run whose files cannot be used, so that the others are still listed."""
    reason = f"its files are damaged: {type(error).__name__}: {error}"[:200]
    return _row(History(folder), math.nan, Verdict("damaged", [reason]))


def summary(history: History, now: float) -> dict[str, Any]:
    """A run as one row of a list."""
    return _row(history, now, judge(history, now))


def _row(history: History, now: float, verdict: Verdict) -> dict[str, Any]:
    facts = asdict(verdict)
    about = ("state", "reasons", "step", "total_steps", "saved_step", "skipped_saves", "loss")
    return {
        "name": history.folder.name,
        **{key: facts[key] for key in about},
        "valid_loss": history.valid.last("valid_loss"),
        "tokens_per_s": history.train.last("tokens_per_s"),
        **{key: facts[key] for key in ("eta_s", "ranks", "restarts")},
        "updated": now - verdict.silent_s if math.isfinite(verdict.silent_s) else math.nan,
    }


def evaluations(valid: Columns) -> list[dict[str, float]]:
    """Every validation, oldest first."""
    names = [name for name in valid.names if name != "time"]
    columns = [valid.column(name).tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def window(steps: FloatArray, first: float, last: float) -> slice:
    """Rows between two steps and one more on each side, so that lines reach the edges of the chart."""
    start, end = np.searchsorted(steps, (first, last))
    return slice(max(0, int(start) - 1), min(len(steps), int(end) + 2))


def series(
    history: History, names: Sequence[str], pieces: int, weight: float, first: float = -math.inf, last: float = math.inf
) -> dict[str, dict[str, list[float]]]:
    """Downsampled curves by name between two steps; noisy ones are averaged over all steps first."""
    train, valid = history.train, history.valid
    curves: dict[str, dict[str, list[float]]] = {}
    for name in names:
        table = valid if name.startswith("valid") else train
        steps, values = table.column("step"), _derived(table, name)
        if not np.isfinite(values).any():
            continue
        shown = window(steps, first, last)
        averaged = history.cached((name, weight), partial(smooth, values, weight)) if name in SMOOTHED else values
        curves[name] = vars(downsample(steps[shown], values[shown], averaged[shown], pieces))
    return curves


def _derived(table: Columns, name: str) -> FloatArray:
    """A column, or a part of the step time (`split.data` and so on) in seconds."""
    if not name.startswith("split."):
        return table.column(name)
    part = name.removeprefix("split.")
    data, communication, save = (np.nan_to_num(table.column(key)) for key in ("data_s", "comm_s", "save_s"))
    parts = {
        "data": data,
        "communication": communication,
        "save": save,
        "compute": np.maximum(0.0, table.column("step_s") - data - communication - save),
    }
    values = parts.get(part)
    # A part that was never measured must not show as a flat zero.
    return values if values is not None and values.any() else np.full(len(table), np.nan)


def jsonable(value: Any, levels: int = 64) -> Any:
    """`value` with NaN and infinities as null, because JSON has no others. Deeper levels are damage."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, levels - 1) for key, item in value.items()} if levels else "damaged"
    if isinstance(value, list | tuple):
        return [jsonable(item, levels - 1) for item in value] if levels else "damaged"
    return value


def plan_and_measured(history: History) -> list[dict[str, Any]]:
    """Values that the plan predicted (`plan` in facts.json), each with what was measured."""
    plan: Record = history.facts().get("plan") or {}

    def measured(name: str, reduce: Callable[[FloatArray], Any] = np.nanmedian) -> float:
        values = history.train.column(name)
        return float(reduce(values)) if np.isfinite(values).any() else math.nan

    saves = [number(event.get("seconds")) for event in history.events if event.get("kind") == "checkpoint_committed"]
    found = {name: measured(name) for name in ("tokens_per_s", "mfu", "step_s")}
    found["memory_gib"] = measured("memory_gib", np.nanmax)
    found["checkpoint_s"] = float(np.median(saves)) if saves else math.nan
    if not math.isfinite(found["mfu"]):
        # Where the device's peak is unknown, a run measures no MFU, and a predicted one means nothing.
        del found["mfu"]
    pairs = {name: (number(plan.get(name)), value) for name, value in found.items()}
    known = {name: pair for name, pair in pairs.items() if any(map(math.isfinite, pair))}
    return [{"what": name, "planned": planned, "measured": value} for name, (planned, value) in known.items()]


_NOT_ENVIRONMENT = ("data", "plan", "total_steps", "parameters", "samples_per_epoch")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def difference(left: Any, right: Any) -> list[dict[str, Any]]:
    """Dotted keys whose values differ; None stands for a missing key."""
    before, after = flatten(left or {}), flatten(right or {})
    keys = sorted(before.keys() | after.keys())
    return [
        {"key": key, "left": before.get(key), "right": after.get(key)}
        for key in keys
        if key and before.get(key) != after.get(key)
    ]


def config_difference(left: str, right: str) -> list[dict[str, Any]]:
    """Fields that differ between two config.yaml files."""
    return difference(_yaml(left), _yaml(right))


def _yaml(text: str) -> Any:
    problems = Problems()
    root = read_yaml(text, "config.yaml", problems)
    return {"config.yaml": str(problems[0].message)} if problems else plain(root) if root else {}


def compare(left: History, right: History) -> dict[str, Any]:
    """Everything that differs between two runs, and the gap between their losses at common steps."""
    facts = (left.facts(), right.facts())
    environments = [{key: value for key, value in each.items() if key not in _NOT_ENVIRONMENT} for each in facts]
    return {
        "left": left.folder.name,
        "right": right.folder.name,
        "config": config_difference(left.config_text(), right.config_text()),
        "data": difference(facts[0].get("data"), facts[1].get("data")),
        "environment": difference(*environments),
        "curves": _loss_difference(left, right),
    }


def _loss_difference(left: History, right: History) -> Record:
    """The gap between two losses over their common steps; empty if there are none."""
    steps, at_left, at_right = np.intersect1d(
        left.train.column("step"), right.train.column("step"), assume_unique=True, return_indices=True
    )
    before, after = left.train.column("loss")[at_left], right.train.column("loss")[at_right]
    if not (np.isfinite(before) | np.isfinite(after)).any():
        return {}
    # A loss that is NaN on one side only is a difference, although it has no size.
    apart = np.flatnonzero((before != after) & ~(np.isnan(before) & np.isnan(after)))
    with np.errstate(invalid="ignore"):
        gaps = after - before
    finite = np.isfinite(gaps)
    sized, sized_steps = gaps[finite], steps[finite]
    largest = int(np.argmax(np.abs(sized))) if len(sized) else None
    newest = {"left": left.train.last("loss"), "right": right.train.last("loss")}
    recent = sized[-max(1, len(sized) // 10) :]
    return {
        "common_steps": len(steps),
        "identical": not len(apart),
        "first_difference_step": int(steps[apart[0]]) if len(apart) else None,
        "largest_gap": float(sized[largest]) if largest is not None else None,
        "largest_gap_step": int(sized_steps[largest]) if largest is not None else None,
        "final_gap": float(sized[-1]) if len(sized) else None,
        "mean_gap_last_tenth": float(recent.mean()) if len(recent) else None,
        # Common steps at which exactly one side is finite.
        "not_finite": int((np.isfinite(before) != np.isfinite(after)).sum()),
        **{f"{side}_last": last if math.isfinite(last) else None for side, last in newest.items()},
    }
