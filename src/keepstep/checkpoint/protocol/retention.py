"""Which committed steps are kept. A delete removes the marker first, so a half-deleted step is not a committed one."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.protocol import commit
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint
from keepstep.checkpoint.protocol.shards import ShardReader
from keepstep.checkpoint.storage.store import Store
from keepstep.core import failpoints, proc
from keepstep.core.errors import CheckpointError
from keepstep.core.step_folders import MARKER

READING = "reading-"
READING_EXPIRES_S = 6 * 3600.0
"""A killed reader leaves its note behind; after this time the note no longer protects the step."""

WRITING = "writing-"
WRITING_EXPIRES_S = 3600.0
"""A writer on another machine cannot be checked from here; after this time it is assumed to be dead."""


@dataclass(frozen=True)
class Rules:
    """What to keep; a step stays if any rule keeps it."""

    keep: int = 3
    """Newest commits; 0 keeps all."""
    keep_every: int = 0
    """Steps divisible by this are never deleted; 0 switches the rule off."""
    keep_best: int = 0
    """Steps with the lowest loss in their metadata; 0 switches the rule off."""


def _surplus(store: Store, steps: Sequence[CommittedCheckpoint], rules: Rules) -> list[CommittedCheckpoint]:
    """The steps that no rule keeps, given all steps, newest first."""
    if rules.keep <= 0:
        return []
    kept = {step.name for step in steps[: rules.keep]}
    if rules.keep_every > 0:
        kept |= {step.name for step in steps if step.step % rules.keep_every == 0}
    if rules.keep_best > 0:
        losses = _losses(store, steps)
        kept |= set(sorted(losses, key=lambda name: (losses[name], name))[: rules.keep_best])
    return [step for step in steps if step.name not in kept]


def removable(store: Store, rules: Rules, note: Callable[[str], None], elsewhere: bool = False) -> list[str]:
    """Names of the steps that may be deleted now, oldest first; none, unless a kept step is intact.

    `elsewhere` means that some files are on other nodes and cannot be checked from here.
    """
    steps = commit.committed_steps(store)
    expired = _surplus(store, steps, rules)
    if not expired:
        return []
    problem = None
    for step in (step for step in steps if step not in expired):
        problem = quick_problem(store, step, elsewhere)
        if problem is None:
            break
    else:
        note(f"no old checkpoint is removed, because none of the newer ones is intact: {problem}")
        return []
    free = []
    for step in reversed(expired):
        if being_read(store, step.name):
            note(f"{step.name} is being read and stays until the next save")
        else:
            free.append(step.name)
    return free


def apply(store: Store, rules: Rules, note: Callable[[str], None], elsewhere: bool = False) -> list[str]:
    """Remove what the rules do not keep; returns the names removed."""
    removed = removable(store, rules, note, elsewhere)
    for name in removed:
        remove_step(store, name)
    return removed


def quick_problem(store: Store, step: CommittedCheckpoint, elsewhere: bool = False) -> str | None:
    """None when manifest, file sizes and headers are intact: the check before an older step is deleted."""
    try:
        manifest = commit.read_manifest(store, step)
        here = set(store.names(step.name))
        for file in manifest.files:
            if elsewhere and file.name not in here:
                continue
            ShardReader(store, step.name, file, manifest.algorithm)
    except CheckpointError as error:
        return error.message
    return None


def _losses(store: Store, steps: Sequence[CommittedCheckpoint]) -> dict[str, float]:
    losses = {}
    for step in steps:
        with suppress(CheckpointError):
            loss = commit.read_manifest(store, step).metadata.get("loss")
            if isinstance(loss, int | float) and loss == loss:
                losses[step.name] = float(loss)
    return losses


def remove_step(store: Store, name: str) -> None:
    """Delete one step."""
    store.remove(f"{name}/{MARKER}")
    failpoints.reach("gc_marker_removed")
    store.remove_folder(name)
    failpoints.reach("gc_folder_removed")


def reading(store: Store, folder: str) -> AbstractContextManager[None]:
    """Mark the step as being read, so that retention does not remove it (where the folder is writable)."""
    present = False
    with suppress(OSError):
        # Never create a note in a folder that is gone: nothing would remove it.
        present = MARKER in store.names(folder)
    return _noted(store, folder, READING) if present else nullcontext()


def writing(store: Store, folder: str) -> AbstractContextManager[None]:
    """Mark the step as being written, so that `abandoned` does not list it."""
    return _noted(store, folder, WRITING)


@contextmanager
def _noted(store: Store, folder: str, prefix: str) -> Iterator[None]:
    name = f"{folder}/{prefix}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    status = proc.status(os.getpid())
    ticks = status.start_ticks if status is not None else 0
    facts = {"time": time.time(), "machine": proc.boot_identity(), "pid": os.getpid(), "start_ticks": ticks}
    # The note is optional: a problem that prevents it may not affect the load or the save itself.
    with suppress(OSError, CheckpointError):
        store.create(name, json.dumps(facts).encode())
    try:
        yield
    finally:
        with suppress(OSError, CheckpointError):
            store.remove(name)


def being_read(store: Store, folder: str) -> bool:
    """Whether a reader left a note in the folder and may still be alive."""
    return _has_note(store, folder, READING, lambda reader: _may_live(reader, READING_EXPIRES_S))


def being_written(store: Store, folder: str) -> bool:
    """Whether a writer left a note in the folder and may still be alive."""
    return _has_note(store, folder, WRITING, lambda writer: _may_live(writer, WRITING_EXPIRES_S))


def _may_live(process: Mapping[str, Any], expires_s: float) -> bool:
    """Whether a process that left a note may still be alive; on other machines its note expires."""
    if process.get("machine") != proc.boot_identity():
        # A note from the far future was written before the clock was set back: it expires as well.
        return abs(time.time() - float(process["time"])) < expires_s
    # Not by its age: the clock may have been set meanwhile.
    found = proc.status(int(process["pid"]))
    return found is not None and found.start_ticks == process.get("start_ticks", found.start_ticks)


def _has_note(store: Store, folder: str, prefix: str, counts: Callable[[Mapping[str, Any]], bool]) -> bool:
    for name in store.names(folder):
        if name.startswith(prefix):
            with suppress(OSError, ValueError, KeyError, TypeError):
                if counts(json.loads(store.read(f"{folder}/{name}"))):
                    return True
    return False


def abandoned(store: Store, note: Callable[[str], None]) -> Iterator[str]:
    """Uncommitted steps that no process is writing; the others are reported to `note`."""
    for folder in commit.uncommitted_folders(store):
        if being_written(store, folder):
            note(f"{folder} is being written and stays")
        else:
            yield folder
