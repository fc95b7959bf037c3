"""Numbered moments at which a test can kill the job: the commit protocol must survive a SIGKILL at each of them.

`KEEPSTEP_FAILPOINT=after_marker:2` kills this process's whole group the second time it gets there, once for all if
`KEEPSTEP_FAILPOINT_MARK` names a file to leave behind; `before_data:sleep=2` waits there each time, as a slow disk
would. Without the variable reaching a failpoint costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "KEEPSTEP_FAILPOINT"
MARK_VARIABLE = "KEEPSTEP_FAILPOINT_MARK"

FAILPOINTS = (
    "copy_started",
    "before_data",
    "after_data",
    "after_part",
    "before_manifest",
    "after_manifest",
    "after_marker",
    "after_latest",
    "gc_marker_removed",
    "gc_folder_removed",
)
"""In the order in which a save comes past them."""

_reached: dict[str, int] = {}


def reach(name: str) -> None:
    """Die or wait here if the environment asks for it."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert name in FAILPOINTS, name
    chosen, _, action = wanted.partition(":")
    if chosen != name:
        return
    if action.startswith("sleep="):
        time.sleep(float(action.removeprefix("sleep=")))
        return
    _reached[name] = _reached.get(name, 0) + 1
    if _reached[name] == int(action or 1) and _is_first():
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _is_first() -> bool:
    """Whether no process died here before, where a mark is asked for."""
    mark = os.environ.get(MARK_VARIABLE)
    if not mark:
        return True
    try:
        with Path(mark).open("x") as file:
            file.write(repr(time.time()))
    except FileExistsError:
        return False
    return True
