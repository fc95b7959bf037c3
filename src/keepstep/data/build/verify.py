"""Is a data set what its build wrote? Every file is read and held against its checksum."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError
from keepstep.data.build.plan import DATASET, REJECTS, STATE, TOKENIZER, Plan, marker_path, read_marker, sha256_file
from keepstep.data.build.run import reject_lines, summarise
from keepstep.data.formats.mds import INDEX


@dataclass(frozen=True)
class Damage:
    """One file that is not what it was, and the task that makes it again; None where the build itself does."""

    file: str
    what: str
    task: int | None


def verify(folder: Path, *, mend: bool = False) -> tuple[int, list[Damage]]:
    """Files checked and what is wrong with them; `mend` takes the marks away, so that the next build redoes them."""
    path = folder / STATE / "plan.json"
    if not path.is_file():
        raise DataError(f"{folder} holds no build", "name the folder that keepstep data build --out wrote")
    plan = Plan.from_json(path.read_text())
    checked = 0
    damages: list[Damage] = []
    markers = [read_marker(folder, task) for task in range(len(plan.tasks))]
    for task, marker in enumerate(markers):
        if marker is None:
            damages.append(Damage(marker_path(folder, task).name, "was never finished", task))
            continue
        for file in marker["files"]:
            checked += 1
            what = _what_is_wrong(folder / file["name"], file["bytes"], file["sha256"])
            if what:
                damages.append(Damage(file["name"], what, task))
    whole = [marker for marker in markers if marker is not None]
    for name, what in _own_files(folder, plan, whole if len(whole) == len(markers) else []):
        checked += 1
        if what:
            damages.append(Damage(name, what, None))
    if mend and damages:
        (folder / DATASET).unlink(missing_ok=True)
        for damage in damages:
            if damage.task is not None:
                marker_path(folder, damage.task).unlink(missing_ok=True)
    return checked, damages


def _own_files(folder: Path, plan: Plan, markers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The files that no task writes, and what is wrong with each; all but one come with the last task."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        yield TOKENIZER, "is missing"
    else:
        wrong = sha256_file(tokenizer) != plan.options.tokenizer_sha256
        yield TOKENIZER, "has other bytes than were written" if wrong else ""
    if not markers:
        return
    yield DATASET, _what_differs(folder / DATASET, summarise(plan, markers))
    rejects = folder / REJECTS
    if not rejects.is_file():
        yield REJECTS, "is missing"
    else:
        alike = rejects.read_bytes() == reject_lines(markers).encode()
        yield REJECTS, "" if alike else "says something else than the tasks do"
    if plan.options.format == "mds":
        shards = [entry for marker in markers for entry in marker["shards"]]
        yield INDEX, _what_differs(folder / INDEX, {"shards": shards})


def _what_differs(path: Path, expected: dict[str, Any]) -> str:
    if not path.is_file():
        return "is missing"
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    # An earlier keepstep may have written less; the lists of files are what counts.
    alike = isinstance(found, dict) and all(
        found.get(key) == value for key, value in expected.items() if key in found or isinstance(value, list)
    )
    return "" if alike else "says something else than the tasks do"


def _what_is_wrong(path: Path, size_bytes: int, sha256: str) -> str:
    if not path.is_file():
        return "is missing"
    found = path.stat().st_size
    if found != size_bytes:
        return f"is {found:,} bytes long instead of {size_bytes:,}"
    return "" if sha256_file(path) == sha256 else "has other bytes than were written"
