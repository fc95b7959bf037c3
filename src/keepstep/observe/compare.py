"""Two runs side by side: configuration, data, environment and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keepstep.observe.columns import FloatArray
from keepstep.observe.folder import Record
from keepstep.observe.history import History

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
    """Dotted keys whose values differ; a key that one side lacks has None there."""
    before, after = flatten(left or {}), flatten(right or {})
    keys = sorted(before.keys() | after.keys())
    return [
        {"key": key, "left": before.get(key), "right": after.get(key)}
        for key in keys
        if key and before.get(key) != after.get(key)
    ]


def config_difference(left: str, right: str) -> list[dict[str, Any]]:
    """Fields that differ between two config.yaml texts."""
    return difference(_yaml(left), _yaml(right))


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError:
        return {"config.yaml": "not readable as YAML"}


def compare(left: History, right: History) -> dict[str, Any]:
    """Everything that differs between two runs, and how their losses stand at the steps both have."""
    facts = (left.facts(), right.facts())
    environments = [{key: value for key, value in told.items() if key not in _NOT_ENVIRONMENT} for told in facts]
    return {
        "left": left.folder.name,
        "right": right.folder.name,
        "config": config_difference(left.config_text(), right.config_text()),
        "data": difference(facts[0].get("data"), facts[1].get("data")),
        "environment": difference(*environments),
        "curves": curve_difference(left, right),
    }


def curve_difference(left: History, right: History, name: str = "loss") -> Record:
    """How far apart two curves are over their common steps; empty when they share none."""
    steps, at_left, at_right = np.intersect1d(
        left.train.column("step"), right.train.column("step"), assume_unique=True, return_indices=True
    )
    before, after = left.train.column(name)[at_left], right.train.column(name)[at_right]
    if not (np.isfinite(before) | np.isfinite(after)).any():
        return {}
    # A loss that is no number on one side alone is the largest difference there is, though it has no size.
    apart = np.flatnonzero((before != after) & ~(np.isnan(before) & np.isnan(after)))
    with np.errstate(invalid="ignore"):
        gaps = after - before
    finite = np.isfinite(gaps)
    sized, sized_steps = gaps[finite], steps[finite]
    largest = int(np.argmax(np.abs(sized))) if len(sized) else None
    recent = sized[-max(1, len(sized) // 10) :]
    return {
        "common_steps": len(steps),
        "identical": not len(apart),
        "first_difference_step": int(steps[apart[0]]) if len(apart) else None,
        "largest_gap": float(sized[largest]) if largest is not None else None,
        "largest_gap_step": int(sized_steps[largest]) if largest is not None else None,
        "final_gap": float(sized[-1]) if len(sized) else None,
        "mean_gap_last_tenth": float(recent.mean()) if len(recent) else None,
        "not_finite": _not_finite(before, after),
        "left_last": _last(left, name),
        "right_last": _last(right, name),
    }


def _not_finite(before: FloatArray, after: FloatArray) -> int:
    """Common steps at which one side has a number and the other has none."""
    return int((np.isfinite(before) != np.isfinite(after)).sum())


def _last(history: History, name: str) -> float | None:
    value = history.train.last(name)
    return value if math.isfinite(value) else None
