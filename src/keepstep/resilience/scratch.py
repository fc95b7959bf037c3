"""A folder for an agent's small files, gone when it ends; what a killed agent left is removed by the next one."""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "keepstep-agent-"
_LOCK = "lock"
_ALSO = "also"
_FORK_SERVER_PREFIX = "pymp-"
SHORT_FOLDER = Path("/tmp")
_LONGEST_FOLDER = 60
"""Sockets have names of at most 108 characters, and Python adds some forty to the folder's."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that is this agent's own: it holds a lock in it for as long as it lives."""
    _sweep(Path(tempfile.gettempdir()))
    while True:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with (folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another agent that starts right now may have taken it for a dead one's before it was locked.
                if (folder / _LOCK).exists():
                    yield folder
                    return


def server_folder() -> Path:
    """Where Python keeps its fork server's socket: in the folder for temporary files, or in a shorter one."""
    usual = tempfile.tempdir
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER and os.access(SHORT_FOLDER, os.W_OK):
        tempfile.tempdir = str(SHORT_FOLDER)
    try:
        # Asked once, the answer stays.
        return Path(multiprocessing.util.get_temp_dir())
    finally:
        tempfile.tempdir = usual


def remove_with(scratch: Path, folder: Path) -> None:
    """Whoever sweeps `scratch` away is to remove this folder too: the fork server's, which Python puts elsewhere."""
    (scratch / _ALSO).write_text(str(folder))


def _sweep(parent: Path) -> None:
    """Remove folders whose lock nobody holds: their agents were killed before they could."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_companion(folder)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Held by a living agent, just being made, or already gone.
            continue


def _remove_companion(folder: Path) -> None:
    also = folder / _ALSO
    if also.is_file():
        named = Path(also.read_text())
        if named.name.startswith(_FORK_SERVER_PREFIX) and named.parent in (folder.parent, SHORT_FOLDER):
            shutil.rmtree(named, ignore_errors=True)
