"""Local files that are either whole or absent: write aside, flush to disk, then rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two writers from sharing one temporary file.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
