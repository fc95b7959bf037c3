"""Local files that are either whole or absent: write aside, flush to disk, then rename."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    with _aside(path, content) as aside:
        aside.replace(path)
    sync_folder(path.parent)


def write_once(path: Path, content: bytes | str) -> bool:
    """Write `path` unless it is there; of several who try at once one succeeds, and is told so."""
    with _aside(path, content) as aside:
        try:
            path.hardlink_to(aside)
        except FileExistsError:
            return False
        except OSError:
            # A file system without links: here only those who try at the very same moment are not kept apart.
            if path.exists():
                return False
            aside.replace(path)
    sync_folder(path.parent)
    return True


@contextmanager
def _aside(path: Path, content: bytes | str) -> Iterator[Path]:
    """The content on the disk, in a file beside `path` that is gone afterwards unless it was moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own keeps two writers apart. Process ids do not: each container on a shared disk has a process 1.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make what a file holds survive a power cut; before it gets its name, or the name may outlive the content."""
    _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
