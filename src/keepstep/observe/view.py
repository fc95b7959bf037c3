"""What a viewer shows of a run, as plain values: the page, the terminal view and the report all start from here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from keepstep.observe.columns import Columns, FloatArray, smooth, thin
from keepstep.observe.folder import Record, number
from keepstep.observe.goodput import CAUSES, account
from keepstep.observe.history import History
from keepstep.observe.verdict import judge, own_seconds

SERIES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib", "step_s")
SPLIT = ("data", "compute", "communication", "save")
"""The parts of a step, in the order they are stacked."""
_EVENTS_SHOWN = 400


def overview(history: History, now: float) -> dict[str, Any]:
    """Verdict, goodput, timeline, ranks, data position, samples and evaluations of one run."""
    verdict = judge(history, now)
    goodput = account(history.events, history.train, history.undone, now)
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
        "facts": history.facts(),
    }


def summary(history: History, now: float) -> dict[str, Any]:
    """A run in one line of a list."""
    verdict = judge(history, now)
    return {
        "name": history.folder.name,
        "state": verdict.state,
        "reasons": verdict.reasons,
        "step": verdict.step,
        "total_steps": verdict.total_steps,
        "loss": verdict.loss,
        "valid_loss": history.valid.last("valid_loss"),
        "tokens_per_s": history.train.last("tokens_per_s"),
        "eta_s": verdict.eta_s,
        "ranks": verdict.ranks,
        "restarts": verdict.restarts,
        "updated": now - verdict.silent_s if math.isfinite(verdict.silent_s) else math.nan,
    }


def evaluations(valid: Columns) -> list[dict[str, float]]:
    """Every validation, oldest first."""
    names = [name for name in valid.names if name != "time"]
    columns = [valid.column(name).tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def window(steps: FloatArray, first: float, last: float) -> slice:
    """Rows between two steps, and one beyond on each side so that lines run to the edge of the chart."""
    start, end = np.searchsorted(steps, (first, last))
    return slice(max(0, int(start) - 1), min(len(steps), int(end) + 2))


def series(
    history: History,
    names: Sequence[str],
    *,
    pieces: int,
    weight: float,
    first: float = -math.inf,
    last: float = math.inf,
) -> dict[str, dict[str, list[float]]]:
    """Thinned curves by name between two steps; the average runs over all steps before it is thinned."""
    train, valid = history.train, history.valid
    curves: dict[str, dict[str, list[float]]] = {}
    for name in names:
        table = valid if name.startswith("valid") else train
        steps, values = table.column("step"), _derived(table, name)
        if not np.isfinite(values).any():
            continue
        shown = window(steps, first, last)
        averaged = values if table is valid else history.remember((name, weight), partial(smooth, values, weight))
        curves[name] = vars(thin(steps[shown], values[shown], averaged[shown], pieces))
    return curves


def _derived(table: Columns, name: str) -> FloatArray:
    """A column, or a part of the step (`split.data` and so on) in seconds."""
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
    # A part that the run never measured is not shown as a flat zero.
    return values if values is not None and values.any() else np.full(len(table), np.nan)


def jsonable(value: Any) -> Any:
    """`value` with NaN and infinities as null, which is all that browsers read."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def plan_beside_truth(history: History) -> list[dict[str, Any]]:
    """What the plan promised (facts.json, `plan`) beside what was measured, for the values that both know."""
    plan: Record = history.facts().get("plan") or {}
    train = history.train

    def median(name: str) -> float:
        values = train.column(name)
        return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan

    saves = [number(event.get("seconds")) for event in history.events if event.get("kind") == "checkpoint_committed"]
    memory = train.column("memory_gib")
    truth = {
        "tokens_per_s": median("tokens_per_s"),
        "mfu": median("mfu"),
        "step_s": median("step_s"),
        "memory_gib": float(np.nanmax(memory)) if np.isfinite(memory).any() else math.nan,
        "checkpoint_s": float(np.median(saves)) if saves else math.nan,
    }
    rows = []
    for name, measured in truth.items():
        planned = number(plan.get(name))
        if math.isfinite(planned) or math.isfinite(measured):
            rows.append({"what": name, "planned": planned, "measured": measured})
    return rows
