"""A build from its plan to its data set: what is left to do, who does it, and the facts once all is done.

Nothing is shared but the folder: whoever finds the last marker in place writes the data set's own, and two who do write
the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.files import write_atomic, write_json
from keepstep.data.build.crew import Crew, load_encoder
from keepstep.data.build.plan import (
    DATASET,
    REJECTS,
    STATE,
    TOKENIZER,
    Plan,
    has_plan,
    open_tasks,
    read_marker,
    settle_plan,
)
from keepstep.data.build.progress import Progress
from keepstep.data.fast import FastLoad

if TYPE_CHECKING:
    from keepstep.data.tokenize import Encoder


@dataclass(frozen=True)
class Share:
    """This machine's part of the tasks: every `of`-th, starting with `number`."""

    number: int = 0
    of: int = 1


def build(
    folder: Path,
    plan: Plan,
    tokenizer: Path,
    *,
    workers: int,
    share: Share = Share(),  # noqa: B008
    loading: FastLoad | None = None,
) -> dict[str, Any] | None:
    """Do what is left of our share; the data set's facts, or None while others still work on theirs.

    `loading` is the fast encoder of the same tokenizer, where the caller began to load it earlier.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encoder = None if has_plan(folder) else _checked_encoder(plan, tokenizer, loading)
    plan = settle_plan(folder, plan, tokenizer)
    mine = list(range(share.number, len(plan.tasks), share.of))
    left = open_tasks(folder, mine)
    progress = Progress(_task_bytes(plan), left, at_most=bool(plan.options.limit))
    if left:
        encoder = encoder or load_encoder(folder / TOKENIZER, loading)
        count = min(workers, len(left))
        if count <= 1:
            _alone(folder, plan, left, encoder, progress)
        else:
            Crew(folder, plan, left, encoder, progress).run(count)
    progress.end()
    return finish(folder, plan)


def _checked_encoder(plan: Plan, tokenizer: Path, loading: FastLoad | None) -> Encoder:
    """The tokenizer of a build that is about to begin: once its plan is written, another one needs another folder."""
    encoder = load_encoder(tokenizer, loading)
    for text in (plan.options.bos, plan.options.eos):
        if text:
            encoder.special(text)
    return encoder


def _task_bytes(plan: Plan) -> list[int]:
    weights = [sum(max(1, piece.stop - piece.start) for piece in pieces) for pieces in plan.tasks]
    total = max(1, sum(weights))
    return [plan.input_bytes * weight // total for weight in weights]


def _alone(folder: Path, plan: Plan, tasks: Sequence[int], encoder: Encoder, progress: Progress) -> None:
    from keepstep.data.build.task import TaskRun

    for task in tasks:
        run = TaskRun(folder, task)
        run.write(plan.tasks[task], plan.options, encoder, progress.add)
        run.publish()
        progress.done(task)
        progress.notice(encoder.notice)


def finish(folder: Path, plan: Plan) -> dict[str, Any] | None:
    """Once every task is marked: the index, the rejects and dataset.json, whose presence says that all is whole."""
    markers = [read_marker(folder, task) for task in range(len(plan.tasks))]
    done = [marker for marker in markers if marker is not None]
    if len(done) < len(markers):
        return None
    facts = summarise(plan, done)
    try:
        _write_facts(folder, plan, done, facts)
    except FileNotFoundError:
        # Somebody else finished the same build, and cleared away what we were writing to.
        if not (folder / DATASET).exists():
            raise
    _clear(folder)
    return facts


def _write_facts(folder: Path, plan: Plan, markers: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    if plan.options.format == "mds":
        from keepstep.data.formats.mds import write_index

        write_index(folder, [entry for marker in markers for entry in marker["shards"]])
    write_atomic(folder / REJECTS, reject_lines(markers))
    write_json(folder / DATASET, facts)


def reject_lines(markers: Sequence[dict[str, Any]]) -> str:
    """What rejects.jsonl holds: the samples of all tasks, in their order."""
    samples = [{"task": marker["task"], **sample} for marker in markers for sample in marker["reject_samples"]]
    return "".join(json.dumps(sample, sort_keys=True) + "\n" for sample in samples)


def _clear(folder: Path) -> None:
    """What killed processes left. Whoever still works on a task that others have finished can do without it."""
    for leftover in (folder / STATE).glob("aside-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for place in (folder, folder / STATE):
        for unfinished in place.glob(".*.tmp"):
            unfinished.unlink(missing_ok=True)


def summarise(plan: Plan, markers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The data set in numbers, from its tasks' own."""
    rejects, dropped = Counter[str](), Counter[str]()
    for marker in markers:
        rejects.update(marker["rejects"])
        dropped.update(marker["dropped"])
    return {
        "format": plan.options.format,
        "documents": sum(marker["documents"] for marker in markers),
        "samples": sum(marker["samples"] for marker in markers),
        "tokens": sum(marker["tokens"] for marker in markers),
        "input_bytes": plan.input_bytes,
        "tokenizer_sha256": plan.options.tokenizer_sha256,
        "bos": plan.options.bos,
        "eos": plan.options.eos,
        "concat": plan.options.concat,
        "tasks": len(markers),
        "rejects": dict(sorted(rejects.items())),
        "dropped": dict(sorted(dropped.items())),
        "files": [{**file, "task": marker["task"]} for marker in markers for file in marker["files"]],
    }
