"""Is a data set what its build wrote? Every file is read and held against its checksum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import DataError
from keepstep.data.build.plan import DATASET, STATE, marker_path, read_marker, sha256_file


@dataclass(frozen=True)
class Damage:
    """One file that is not what it was, and the task that makes it again."""

    file: str
    what: str
    task: int


def verify(folder: Path, *, mend: bool = False) -> tuple[int, list[Damage]]:
    """Files checked and what is wrong with them; `mend` takes the marks away, so that the next build redoes them."""
    plan = folder / STATE / "plan.json"
    if not plan.is_file():
        raise DataError(f"{folder} holds no build", "name the folder that keepstep data build --out wrote")
    tasks = len(json.loads(plan.read_text())["tasks"])
    checked = 0
    damages: list[Damage] = []
    for task in range(tasks):
        marker = read_marker(folder, task)
        if marker is None:
            damages.append(Damage(marker_path(folder, task).name, "was never finished", task))
            continue
        for file in marker["files"]:
            checked += 1
            what = _what_is_wrong(folder / file["name"], file["bytes"], file["sha256"])
            if what:
                damages.append(Damage(file["name"], what, task))
    if mend and damages:
        (folder / DATASET).unlink(missing_ok=True)
        for damage in damages:
            marker_path(folder, damage.task).unlink(missing_ok=True)
    return checked, damages


def _what_is_wrong(path: Path, size_bytes: int, sha256: str) -> str:
    if not path.is_file():
        return "is missing"
    found = path.stat().st_size
    if found != size_bytes:
        return f"is {found:,} bytes long instead of {size_bytes:,}"
    return "" if sha256_file(path) == sha256 else "has other bytes than were written"
