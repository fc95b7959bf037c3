"""Which committed steps stay. Deleting goes marker first, so that a half-deleted step is one that does not exist."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.checkpoint import failpoints
from keepstep.checkpoint.manifest import MARKER, StepFolder
from keepstep.checkpoint.store import Store


def surplus(steps: Sequence[StepFolder], keep: int) -> list[StepFolder]:
    """The steps that may go, given all of them with the newest first; keep 0 keeps all."""
    return list(steps[keep:]) if keep > 0 else []


def remove_step(store: Store, step: StepFolder) -> None:
    """Delete one step."""
    store.remove(f"{step.name}/{MARKER}")
    failpoints.reach("gc_marker_removed")
    store.remove_folder(step.name)
    failpoints.reach("gc_folder_removed")
