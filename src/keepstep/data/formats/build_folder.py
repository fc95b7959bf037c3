"""The folder that `keepstep data build` writes: names of its files, and whether the build has finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError

STATE = ".keepstep"
"""The folder with the build's plan and the markers of its finished tasks."""
PLAN = "plan.json"
TOKENIZER = "tokenizer.json"
DATASET = "dataset.json"
"""The facts of the data set, written last: a folder that has it is complete."""
REJECTS = "rejects.jsonl"


def has_plan(folder: Path) -> bool:
    """Whether a build was started in a folder."""
    return (folder / STATE / PLAN).is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether a build was started in a folder and is not complete."""
    return has_plan(folder) and not (folder / DATASET).is_file()


def unfinished_error(where: str) -> DataError:
    """The error for a caller who wants to read such a folder."""
    return DataError(f"{where} is a build that has not finished", "start its keepstep data build command again")


def build_facts(folder: Path) -> dict[str, Any]:
    """The facts of a complete build; empty for data of another tool."""
    try:
        facts = json.loads((folder / DATASET).read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def stored_tokenizer(path: Path) -> Path | None:
    """The tokenizer.json in the folder of a data set, or next to a prefix; None where there is none."""
    found = (folder / TOKENIZER for folder in (path, path.parent))
    return next((file for file in found if file.is_file()), None)
