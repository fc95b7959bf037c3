"""Local files that are either whole or absent: write aside, flush to disk, then rename."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own keeps two writers apart. Process ids do not: each container on a shared disk has a process 1.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
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
