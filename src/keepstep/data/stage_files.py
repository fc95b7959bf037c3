"""What a stage of the pipeline leaves in its folder: its files, what it began with, and the mark that it is whole."""

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
"""In a stage's folder: what it was begun with."""
DONE = "done.json"
"""In a stage's folder: that it is whole."""


def folder_name(stage: Stage) -> str:
    """What a stage's folder is called."""
    return f"{STAGES.index(stage) + 1}-{stage}"


_FOLDERS = frozenset(map(folder_name, STAGES))


def is_stage(folder: Path) -> bool:
    """Whether a stage has begun, or is whole, in a folder."""
    return folder.resolve().name in _FOLDERS and any((folder / name).is_file() for name in (PLAN, DONE))


def is_mark(path: str) -> bool:
    """Whether a file, near or far, is a stage's own and no data."""
    place = PurePosixPath(path)
    return place.name in (PLAN, DONE) and place.parent.name in _FOLDERS


def mark_whole(folder: Path, names: Sequence[str]) -> None:
    """Say that a stage is whole, and how long each of its files is."""
    sync_folder(folder)
    sizes = {name: (folder / name).stat().st_size for name in names}
    write_json(folder / DONE, {"files": len(names), "bytes": sum(sizes.values()), "sizes": sizes})


def whole_files(folder: Path) -> list[Path]:
    """The files of a stage, by name, all of them there and as long as they were written; else an error."""
    if not (folder / DONE).is_file():
        raise DataError(f"{folder} is a stage that is not whole", "run every share of its stage first")
    mark: dict[str, Any] = json.loads((folder / DONE).read_text())
    sizes: dict[str, int] | None = mark.get("sizes")
    found = {path.name: path.stat().st_size for path in folder.iterdir() if _is_output(path)}
    if sizes is None:
        # The mark of an earlier keepstep.
        if (len(found), sum(found.values())) != (mark["files"], mark["bytes"]):
            raise DataError(
                f"{folder} holds {len(found):,} files of {sum(found.values()):,} bytes, but its stage wrote "
                f"{mark['files']:,} of {mark['bytes']:,}",
                f"remove what is not as it was, and {folder / DONE}: the stage makes what is missing again",
            )
        sizes = found
    for name, size_bytes in sizes.items():
        if found.get(name) != size_bytes:
            what = "is missing" if name not in found else f"is {found[name]:,} bytes long instead of {size_bytes:,}"
            raise DataError(
                f"{folder / name} {what}",
                f"remove it and {folder / DONE}, then run its stage again: it makes this file anew",
            )
    return [folder / name for name in sorted(sizes)]


def _is_output(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name not in (PLAN, DONE)
