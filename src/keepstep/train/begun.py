"""Which checkpoints a run has made since its command was started.

`checkpoint.autoresume: false` begins anew with each command. What its launcher starts again because something broke is
still the same command: that goes on from its own checkpoints, and from no older ones that lie beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from keepstep.core.files import write_json
from keepstep.core.ranks import Ranks


def begun_after(path: Path, ranks: Ranks, newest_sequence: Callable[[], int]) -> int:
    """The sequence number of the newest checkpoint from before this command, kept in the file `path`. Collective."""
    newest = newest_sequence()
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (ranks.launch, ranks.restarts))
    after = [newest]
    if ranks.is_first:
        launches = sorted({launch for launch, _ in everyone if launch})
        before = _read(path) if any(restarts for _, restarts in everyone) else None
        # One launcher in common is enough: nodes that were replaced have new ones. None in common means that the
        # attempts of this command so far broke before they came here, and the file is that of an earlier command.
        if before is not None and set(before[0]) & set(launches):
            after = [before[1]]
        write_json(path, {"launches": launches, "after": after[0]})
    dist.broadcast_object_list(after)
    return after[0]


def _read(path: Path) -> tuple[list[str], int] | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return list(told["launches"]), int(told["after"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
