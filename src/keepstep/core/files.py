"""Local files: atomic writes (a temporary file, flushed to disk, then renamed), the user's home and cache folders."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.core import proc
from keepstep.core.errors import DataError, malformed_as

_NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path`: a reader sees the old content or the new, also after a crash."""
    with _aside(path, content) as aside:
        aside.replace(path)
    sync_folder(path.parent)


def write_once(path: Path, content: bytes | str, check: Callable[[], None] = lambda: None) -> bool:
    """Write `path` unless it exists. If several processes try, exactly one gets True.

    `check` may refuse by raising. It is called last, when the content is on disk and only the name is missing.
    """
    with _aside(path, content) as aside:
        check()
        try:
            # A hard link, unlike a rename, fails when the target exists: the first writer wins.
            path.hardlink_to(aside)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # For example blobfuse. A reader may see an empty file for a moment.
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                return False
            aside.replace(path)
    sync_folder(path.parent)
    return True


@contextmanager
def _aside(path: Path, content: bytes | str) -> Iterator[Path]:
    """A temporary file next to `path` with the content on disk; deleted afterwards unless it was moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id is not unique on a shared disk: every container has a process 1.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def temporary_name(path: Path, ending: str) -> Path:
    """`.NAME.PID.ENDING` next to `path`. What killed processes of this machine left under such names is deleted."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.{re.escape(ending)}(\..*)?")
    for left in path.parent.iterdir() if path.parent.is_dir() else ():
        match = pattern.fullmatch(left.name)
        if match is not None and not proc.exists(int(match[1])):
            left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_regular(path: Path, limit_bytes: int, offset: int = 0) -> bytes:
    """At most `limit_bytes` of a file. A link, a pipe or a device counts as missing: it may lead away or block."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", str(path))
    # The flags hold against a replacement in the meantime.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(handle, max(0, min(limit_bytes, os.fstat(handle).st_size - offset)), offset)
    finally:
        os.close(handle)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the user's data."""
    with malformed_as(DataError, f"{path} is damaged", "copy or download the file again"):
        found = json.loads(raw := path.read_bytes())
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}, not an object")
        if re.search(rb"\\u[dD][89a-fA-F]", raw):
            json.dumps(found, ensure_ascii=False).encode()  # refuses half a character (a lone surrogate)
    return found


_UNFINISHED = ".unfinished"


def is_vacant(folder: Path) -> bool:
    """Whether `finished_in` can fill this folder: it is absent, empty, or has the rest of a killed attempt.

    That attempt may have been killed while its files moved up; the next one replaces them.
    """
    if not folder.is_dir():
        return not folder.exists()
    return (folder / _UNFINISHED).is_dir() or not any(folder.iterdir())


@contextmanager
def finished_in(folder: Path) -> Iterator[Path]:
    """A temporary folder inside a vacant one. Its files move up if the block succeeds; otherwise nothing is left.

    It is inside because `folder` may be a mount point, which nothing can be renamed to. config.json and
    adapter_config.json, by which readers recognize the folder, move last: if they exist, all other files do.
    """
    aside = folder / _UNFINISHED
    if aside.exists():
        shutil.rmtree(aside)
    moved: list[Path] = []
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            sync_file(path)
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
    """Make renames inside `folder` survive a power failure."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power failure. Call it before the rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def home_folder() -> Path:
    """The user's home; `/`, as in container runtimes, for a user id without a name and without HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/keepstep`, or `~/.cache/keepstep`. It may not be writable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "keepstep"
