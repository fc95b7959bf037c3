"""How checkpoints are named on disk: what viewers need to find the newest one without reading it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from keepstep.core.files import read_regular

MARKER = "_SUCCESS"
"""The file that commits a step. A step without it does not exist."""

_STEP_FOLDER = re.compile(r"^step_(\d{8,15})(?:\.(\d{1,15}))?$")


def folder_name(step: int, attempt: int = 0) -> str:
    """`step_00000100`; a step that is saved again after a rollback gets `.1`, because folders are never reused."""
    return f"step_{step:08d}" + (f".{attempt}" if attempt else "")


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a step folder's name, or None for anything else."""
    match = _STEP_FOLDER.match(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def newest_saved_step(folder: Path) -> tuple[int, float] | None:
    """Step and time of the newest commit in a local folder of checkpoints; None if there is none."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if parsed := parse_folder_name(path.name):
                marker = json.loads(read_regular(path / MARKER, 2**20))
                found.append((int(marker["sequence"]), parsed, float(marker["time"])))
    return (max(found)[1][0], max(found)[2]) if found else None
