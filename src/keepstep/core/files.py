"""Local files that are either whole or absent: write aside, flush to disk, then rename."""

from __future__ import annotations

import json
import os
import secrets
import shutil
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


_UNFINISHED = ".unfinished"


def is_vacant(folder: Path) -> bool:
    """Whether a folder can be filled by `finished_in`: absent, empty, or left so by one that was killed."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(item.name == _UNFINISHED for item in folder.iterdir())


@contextmanager
def finished_in(folder: Path) -> Iterator[Path]:
    """A folder inside a vacant one to write into; its files move up once all is well, and else nothing is left.

    Inside, because `folder` may be a mounted volume, onto which nothing can be renamed. The file by which readers know
    such a folder, config.json or adapter_config.json, comes last: where it lies all others do.
    """
    aside = folder / _UNFINISHED
    if aside.exists():
        shutil.rmtree(aside)
    moved: list[Path] = []
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            (sync_folder if path.is_dir() else sync_file)(path)
        for path in sorted(aside.iterdir(), key=lambda item: item.name in ("config.json", "adapter_config.json")):
            moved.append(folder / path.name)
            path.replace(moved[-1])
        aside.rmdir()
    except BaseException:
        for path in reversed(moved):
            path.unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder)


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
