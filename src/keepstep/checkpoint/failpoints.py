"""Numbered moments at which a test can kill the job: the commit protocol must survive a SIGKILL at each of them.

`KEEPSTEP_FAILPOINT=after_marker:2` kills this process's whole group the second time it gets there. Without the variable
reaching a failpoint costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "KEEPSTEP_FAILPOINT"

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
    """Die here if the environment asks for it."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert name in FAILPOINTS, name
    chosen, _, count = wanted.partition(":")
    if chosen == name:
        _reached[name] = _reached.get(name, 0) + 1
        if _reached[name] == int(count or 1):
            os.killpg(os.getpgrp(), signal.SIGKILL)
