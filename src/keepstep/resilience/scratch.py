"""A folder for an agent's small files, removed when it ends; the next agent removes those of killed agents."""

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
"""Socket paths have at most 108 characters, and Python adds about forty to the folder's."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder for this agent, which holds a lock in it for as long as it lives."""
    _sweep(Path(tempfile.gettempdir()))
    while True:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with (folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another agent that starts right now may have removed it before it was locked.
                if (folder / _LOCK).exists():
                    yield folder
                    return


def fork_server_folder() -> Path:
    """The folder of Python's fork server socket: below the folder for temporary files, or below a shorter path."""
    usual = tempfile.tempdir
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER and os.access(SHORT_FOLDER, os.W_OK):
        tempfile.tempdir = str(SHORT_FOLDER)
    try:
        # Python chooses the folder in the first call and keeps it.
        return Path(multiprocessing.util.get_temp_dir())
    finally:
        tempfile.tempdir = usual


def register_companion(scratch: Path, folder: Path) -> None:
    """Record a folder that must be removed with `scratch`: the fork server's, which Python creates elsewhere."""
    (scratch / _ALSO).write_text(str(folder))


def _sweep(parent: Path) -> None:
    """Remove folders whose lock nobody holds: their agents were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                also = folder / _ALSO
                named = Path(also.read_text()) if also.is_file() else folder
                if named.name.startswith(_FORK_SERVER_PREFIX) and named.parent in (folder.parent, SHORT_FOLDER):
                    shutil.rmtree(named, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Held by a live agent, just being created, or already gone.
            continue
