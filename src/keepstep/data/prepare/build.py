"""A build from its plan to its data set: do the remaining tasks, then write the facts; later, verify its files.

Processes share nothing but the folder. A process that finds all task markers writes the facts of the data set; if two
do so, both write the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic, write_json
from keepstep.data.fast_tokenizer import FastLoad
from keepstep.data.formats.build_folder import DATASET, REJECTS, STATE, TOKENIZER, has_plan
from keepstep.data.prepare.plan import Plan, load_or_create_plan, marker_path, read_marker, remaining_tasks, sha256_file
from keepstep.data.prepare.worker_pool import Progress, WorkerPool, load_encoder

if TYPE_CHECKING:
    from keepstep.data.tokenization import Encoder


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
    """Do the remaining tasks of this share; returns the data set's facts, or None while other shares are not done.

    `loading` is the fast encoder of the same tokenizer if the caller has started to load it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encoder = None if has_plan(folder) else _checked_encoder(plan, tokenizer, loading)
    plan = load_or_create_plan(folder, plan, tokenizer)
    tasks = remaining_tasks(folder, list(range(share.number, len(plan.tasks), share.of)))
    progress = Progress(_task_bytes(plan), tasks, at_most=bool(plan.options.limit))
    if tasks:
        encoder = encoder or load_encoder(folder / TOKENIZER, loading)
        count = min(workers, len(tasks))
        if count <= 1:
            _run_tasks(folder, plan, tasks, encoder, progress)
        else:
            WorkerPool(folder, plan, tasks, encoder, progress).run(count)
    progress.end()
    return _finish(folder, plan)


def _checked_encoder(plan: Plan, tokenizer: Path, loading: FastLoad | None) -> Encoder:
    """The tokenizer of a new build, checked before the plan is written: later, another one needs another folder."""
    encoder = load_encoder(tokenizer, loading)
    for text in (plan.options.bos, plan.options.eos):
        if text:
            encoder.special(text)
    return encoder


def _task_bytes(plan: Plan) -> list[int]:
    weights = [sum(max(1, piece.stop - piece.start) for piece in pieces) for pieces in plan.tasks]
    total = max(1, sum(weights))
    return [plan.input_bytes * weight // total for weight in weights]


def _run_tasks(folder: Path, plan: Plan, tasks: Sequence[int], encoder: Encoder, progress: Progress) -> None:
    from keepstep.data.prepare.task import TaskRun

    for task in tasks:
        run = TaskRun(folder, plan, task, encoder)
        run.write(progress.add)
        run.publish()
        progress.done(task)
        progress.notice(encoder.notice)


def _finish(folder: Path, plan: Plan) -> dict[str, Any] | None:
    """Once every task is done: write the index, the rejects and, last, dataset.json, which marks the set complete."""
    markers = [read_marker(folder, task) for task in range(len(plan.tasks))]
    done = [marker for marker in markers if marker is not None]
    if len(done) < len(markers):
        return None
    facts = _summarise(plan, done)
    if not facts["documents"]:
        left_out = facts["rejects"] | facts["dropped"]
        why = (
            "; left out: " + ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) if left_out else ""
        )
        raise DataError(
            f"{folder} would hold no document: the inputs hold no text that is kept{why}",
            "give inputs with text, or fewer filters, and another --out",
        )
    try:
        if plan.options.format == "mds":
            from keepstep.data.formats.mds_writer import write_index

            write_index(folder, _shards(done))
        write_atomic(folder / REJECTS, _reject_lines(done))
        write_json(folder / DATASET, facts)
    except FileNotFoundError:
        # Another process finished the same build and removed our temporary file.
        if not (folder / DATASET).exists():
            raise
    # What killed processes left, and what a slower process still writes for a finished task.
    for leftover in (folder / STATE).glob("aside-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for place in (folder, folder / STATE):
        for unfinished in place.glob(".*.tmp"):
            unfinished.unlink(missing_ok=True)
    return facts


def _shards(markers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for marker in markers for entry in marker["shards"]]


def _reject_lines(markers: Sequence[dict[str, Any]]) -> bytes:
    """The content of rejects.jsonl: the samples of all tasks, in their order."""
    samples = [{"task": marker["task"], **sample} for marker in markers for sample in marker["reject_samples"]]
    return "".join(json.dumps(sample, sort_keys=True) + "\n" for sample in samples).encode()


def _summarise(plan: Plan, markers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the data set, summed over its tasks."""
    rejects, dropped = Counter[str](), Counter[str]()
    for marker in markers:
        rejects.update(marker["rejects"])
        dropped.update(marker["dropped"])
    # A task of an earlier version did not record its largest id.
    largest = [marker["largest_id"] for marker in markers if "largest_id" in marker]
    return {
        **({"largest_id": max(largest)} if largest and len(largest) == len(markers) else {}),
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


@dataclass(frozen=True)
class Damage:
    """A damaged file, and the task that writes it again; None where the end of the build does."""

    file: str
    what: str
    task: int | None


def verify(folder: Path, *, repair: bool = False) -> tuple[int, list[Damage]]:
    """Read every file of a build and compare it with its checksum; the number of checked files and the damaged ones.

    `repair` removes the markers of damaged files, so that a build redoes them.
    """
    if not has_plan(folder):
        raise DataError(f"{folder} holds no build", "name the folder that keepstep data build --out wrote")
    plan = Plan.read(folder)
    checked = 0
    damages: list[Damage] = []
    markers = [read_marker(folder, task) for task in range(len(plan.tasks))]
    for task, marker in enumerate(markers):
        if marker is None:
            damages.append(Damage(marker_path(folder, task).name, "was never finished", task))
            continue
        for file in marker["files"]:
            checked += 1
            what = _file_damage(folder / file["name"], file["sha256"], file["bytes"])
            if what:
                damages.append(Damage(file["name"], what, task))
    done = [marker for marker in markers if marker is not None]
    for name, what in _build_files(folder, plan, done if len(done) == len(markers) else []):
        checked += 1
        if what:
            damages.append(Damage(name, what, None))
    if repair and damages:
        (folder / DATASET).unlink(missing_ok=True)
        for damage in damages:
            if damage.task is not None:
                marker_path(folder, damage.task).unlink(missing_ok=True)
    return checked, damages


def _build_files(folder: Path, plan: Plan, markers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The files that no task writes, and their damage; all but the tokenizer are written after the last task."""
    yield TOKENIZER, _file_damage(folder / TOKENIZER, plan.options.tokenizer_sha256)
    if not markers:
        return
    yield DATASET, _content_damage(folder / DATASET, partial(_agrees, _summarise(plan, markers)))
    yield REJECTS, _content_damage(folder / REJECTS, lambda raw: raw == _reject_lines(markers))
    if plan.options.format == "mds":
        from keepstep.data.formats.mds_reader import INDEX

        yield INDEX, _content_damage(folder / INDEX, partial(_agrees, {"shards": _shards(markers)}))


def _content_damage(path: Path, is_same: Callable[[bytes], bool]) -> str:
    if not path.is_file():
        return "is missing"
    return "" if is_same(path.read_bytes()) else "differs from what the tasks recorded"


def _agrees(expected: dict[str, Any], raw: bytes) -> bool:
    """Whether JSON holds these facts. An earlier version may have written fewer; the lists of files must be there."""
    try:
        found = json.loads(raw)
    except ValueError:
        return False
    return isinstance(found, dict) and all(
        found.get(key) == value for key, value in expected.items() if key in found or isinstance(value, list)
    )


def _file_damage(path: Path, sha256: str, size_bytes: int | None = None) -> str:
    if not path.is_file():
        return "is missing"
    found = path.stat().st_size
    if size_bytes not in (None, found):
        return f"is {found:,} bytes long instead of {size_bytes:,}"
    return "" if sha256_file(path) == sha256 else "has other bytes than were written"
