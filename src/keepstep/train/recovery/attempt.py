"""The attempt marker: which checkpoints were there before the run's command was started.

With `checkpoint.autoresume: false` each command starts from the beginning. A restart after a fault is still the same
command: it resumes from the checkpoints of this command, and from no older ones in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from keepstep.core.files import write_json
from keepstep.train.context import RunContext
from keepstep.train.recovery.storage_wait import wait_for_room


def sequence_before_command(
    context: RunContext, newest_sequence: Callable[[], int], note: Callable[[str], None]
) -> int:
    """The sequence number of the newest checkpoint from before this command, stored in the marker. Collective."""
    path, ranks = context.folder.attempt_marker, context.world.ranks
    newest = newest_sequence()
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (ranks.launch, ranks.restarts))
    after = [newest]
    if ranks.is_first:
        launches = sorted({launch for launch, _ in everyone if launch})
        marker = _read(path) if any(restarts for _, restarts in everyone) else None
        # One launcher in common is enough: nodes that were replaced have new ones. None in common means that earlier
        # attempts of this command failed before they came here, and the marker is that of an earlier command.
        if marker is not None and set(marker[0]) & set(launches):
            after = [marker[1]]
        marker_now = {"launches": launches, "after": after[0]}
        wait_for_room(
            context.config.checkpoint.retry_s,
            context.folder.root,
            context.stop,
            lambda: write_json(path, marker_now),
            note,
        )
    dist.broadcast_object_list(after)
    return after[0]


def _read(path: Path) -> tuple[list[str], int] | None:
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        return list(marker["launches"]), int(marker["after"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
