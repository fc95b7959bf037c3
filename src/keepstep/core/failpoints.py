"""Named points at which a test can kill a process: saves and steps must survive a SIGKILL at each of them.

`KEEPSTEP_FAILPOINT=after_marker:2` kills the process group the second time it reaches that point. With
`KEEPSTEP_FAILPOINT_MARK=FILE` that happens only once, in the first process that creates FILE. `before_data:sleep=2`
sleeps there each time, like a slow disk. A comma separates failpoints. Without the variable one costs a dictionary
lookup.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

VARIABLE = "KEEPSTEP_FAILPOINT"
MARK_VARIABLE = "KEEPSTEP_FAILPOINT_MARK"

FAILPOINTS = (
    "copy_started", "before_data", "after_data", "after_part", "before_manifest", "after_manifest", "after_marker",
    "after_latest", "gc_marker_removed", "gc_folder_removed",
)  # fmt: skip
"""In the order in which a save reaches them."""
STEP_FAILPOINTS = (
    "view_received", "exchange_formed", "sum_half", "summed", "prepared", "committed", "applied", "serving", "entering",
    "copying", "copied", "replayed",
)  # fmt: skip
"""In the order in which a replica that steps with others reaches them; the last three when it joins."""

_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """Die or sleep here if the environment asks for it."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert name in FAILPOINTS + STEP_FAILPOINTS, name
    action = next((each[len(name) + 1 :] for each in wanted.split(",") if each.partition(":")[0] == name), None)
    if action is None:
        return
    if action.startswith("sleep="):
        time.sleep(float(action.removeprefix("sleep=")))
        return
    _reached[name] += 1
    if _reached[name] == int(action or 1) and _is_first():
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _is_first() -> bool:
    """Whether no process has died here before; always true without a mark file."""
    mark = os.environ.get(MARK_VARIABLE)
    if not mark:
        return True
    try:
        with Path(mark).open("x") as file:
            file.write(repr(time.time()))
    except FileExistsError:
        return False
    return True
