"""Files in the folder of a pipeline stage: its output, its plan, and the marker that it is complete."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from keepstep.core.errors import DataError
from keepstep.core.files import sync_folder, write_json

Stage = Literal["download", "extract", "concatenate", "tokenise"]
STAGES: tuple[Stage, ...] = get_args(Stage)
PLAN = "plan.json"
"""In a stage's folder: the inputs and options it was started with."""
DONE = "done.json"
"""In a stage's folder: the marker that it is complete."""


def folder_name(stage: Stage) -> str:
    """The name of a stage's folder."""
    return f"{STAGES.index(stage) + 1}-{stage}"


_FOLDERS = frozenset(map(folder_name, STAGES))


def is_stage(folder: Path) -> bool:
    """Whether a folder is that of a stage, complete or not."""
    return folder.resolve().name in _FOLDERS and any((folder / name).is_file() for name in (PLAN, DONE))


def is_stage_marker(path: str) -> bool:
    """Whether a local or remote file is the plan or the marker of a stage and not data."""
    place = PurePosixPath(path)
    return place.name in (PLAN, DONE) and place.parent.name in _FOLDERS


def mark_complete(folder: Path, names: Sequence[str]) -> None:
    """Write the marker of a complete stage, with the size of each file."""
    sync_folder(folder)
    sizes = {name: (folder / name).stat().st_size for name in names}
    write_json(folder / DONE, {"files": len(names), "bytes": sum(sizes.values()), "sizes": sizes})


def complete_files(folder: Path) -> list[Path]:
    """The files of a complete stage, by name; an error if one is missing or has another size."""
    if not (folder / DONE).is_file():
        raise DataError(f"{folder} is a stage that is not complete", "run every share of its stage first")
    marker: dict[str, Any] = json.loads((folder / DONE).read_text())
    sizes: dict[str, int] | None = marker.get("sizes")
    found = {path.name: path.stat().st_size for path in folder.iterdir() if _is_output(path)}
    if sizes is None:
        # A marker of an earlier version.
        if (len(found), sum(found.values())) != (marker["files"], marker["bytes"]):
            raise DataError(
                f"{folder} holds {len(found):,} files of {sum(found.values()):,} bytes, but its stage wrote "
                f"{marker['files']:,} of {marker['bytes']:,}",
                f"remove the changed files and {folder / DONE}, then run the stage again: it writes what is missing",
            )
        sizes = found
    for name, size_bytes in sizes.items():
        if found.get(name) != size_bytes:
            what = "is missing" if name not in found else f"is {found[name]:,} bytes long instead of {size_bytes:,}"
            raise DataError(
                f"{folder / name} {what}",
                f"remove it and {folder / DONE}, then run its stage again: it writes this file again",
            )
    return [folder / name for name in sorted(sizes)]


def _is_output(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name not in (PLAN, DONE)
