"""Wait for room where the run's folder is on a full disk: the run starts by itself once there is some."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.core.errors import EXIT_STORAGE_FULL, NotSavedError, StopRequested
from keepstep.core.units import format_seconds
from keepstep.resilience.signals import StopFlag

POLL_S = 1.0


def wait_for_room(
    retry_s: float, folder: Path, stop: StopFlag, write: Callable[[], None], note: Callable[[str], None]
) -> None:
    """Call `write`, and again for `retry_s` while the disk is full; NotSavedError after that."""
    deadline = time.monotonic() + retry_s
    noted = False
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = f"{folder} cannot be written: {error.strerror}"
        if stop.requested:
            raise StopRequested(
                f"stopped on request while waiting for room in {folder}", "start the same command to resume"
            )
        if time.monotonic() > deadline:
            hint = "free some space there, then start the same command"
            raise NotSavedError(message, hint, EXIT_STORAGE_FULL)
        if not noted:
            noted = True
            note(f"warning: {message}; waiting {format_seconds(retry_s)} for room")
        time.sleep(POLL_S)
