"""One training at a time in a run's folder: two would mix their metrics and their checkpoints.

The folder is held by a socket with a name made from it, on this machine. The kernel takes the name back when the
process ends, however it ends, so that nothing stale can keep a run from going on; and no file system needs to know of
locks.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keepstep.core.errors import RunTakenError, StopRequested

WAIT_S = 60.0
"""How long the processes of a launcher that was killed may take for their last save."""
_POLL_S = 0.1


@contextmanager
def alone_in(folder: Path, stopped: Callable[[], bool], wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the folder; wait for another training in it to end, then refuse."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        name = _name(folder)
        deadline = time.monotonic() + wait_s
        who = ""
        while not _bound(holder, name):
            if not who:
                who = _holder(name)
                print(f"notice: {who} trains in {folder}: waiting for its end", file=sys.stderr, flush=True)
            if stopped():
                raise StopRequested(f"stopped on request while waiting for {folder}")
            if time.monotonic() > deadline:
                raise RunTakenError(
                    f"{who} trains in {folder} already", "stop it first, or give this run another name="
                )
            time.sleep(_POLL_S)
        holder.listen(1)
        yield


def _name(folder: Path) -> str:
    """By what the folder is, not by how it is called: containers may call different folders the same."""
    status = folder.stat()
    # The leading zero byte makes it a name without a file.
    return f"\0keepstep-run-{status.st_dev}-{status.st_ino}"


def _bound(holder: socket.socket, name: str) -> bool:
    try:
        holder.bind(name)
    except OSError:
        return False
    return True


def _holder(name: str) -> str:
    """Who holds the folder, as the kernel knows it."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        caller.connect(name)
        pid, _, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if pid:
            return f"process {pid}"
    return "another process"
