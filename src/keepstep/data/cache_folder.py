"""Folders of prepared data: each is built once, by one process, and is either complete or absent."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.core.files import sync_file, sync_folder

FACTS = "facts.json"


def read_facts(folder: Path) -> dict[str, Any]:
    """What is known about prepared data; empty where no facts were written."""
    path = folder / FACTS
    if not path.is_file():
        return {}
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def prepare_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build `folder` once, in a temporary folder that is renamed when it is complete.

    The lock saves a second process the work. The rename alone keeps the result correct, even on file systems without
    locks.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.parent / f".{folder.name}.lock") as locked:
        if folder.is_dir():
            return folder
        if locked:
            for leftover in folder.parent.glob(f".{folder.name}.*.aside"):
                shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".aside", dir=folder.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)
            # Flushed before the rename: after a power cut, empty files would be taken for prepared data for good.
            for path in temporary.rglob("*"):
                (sync_folder if path.is_dir() else sync_file)(path)
            sync_folder(temporary)
            try:
                temporary.rename(folder)
            except OSError:
                # Another node was faster, and the lock does not reach it: its folder holds the same bytes.
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder.parent)
    return folder


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Hold a file lock, which the kernel releases when the process dies; False where the file system has no locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(handle)
