"""Which committed steps stay. Deleting goes marker first, so that a half-deleted step is one that does not exist."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint import commit, failpoints
from keepstep.checkpoint.manifest import MARKER, StepFolder
from keepstep.checkpoint.shards import ShardReader
from keepstep.checkpoint.store import Store
from keepstep.core.errors import CheckpointError

READING = "reading-"
READING_EXPIRES_S = 6 * 3600.0
"""A reader that was killed leaves its note behind; after this long the note no longer protects the step."""

WRITING = "writing-"
WRITING_EXPIRES_S = 3600.0
"""Whether a writer on another machine still lives cannot be told from here; after this long it is taken to be dead."""


@dataclass(frozen=True)
class Rules:
    """What to keep; a step that any rule keeps stays."""

    keep: int = 3
    """Newest commits; 0 keeps all."""
    keep_every: int = 0
    """Steps divisible by this stay for good; 0 switches the rule off."""
    keep_best: int = 0
    """Steps with the lowest loss in their metadata; 0 switches the rule off."""


def surplus(steps: Sequence[StepFolder], rules: Rules, losses: Mapping[str, float]) -> list[StepFolder]:
    """The steps that may go, given all of them with the newest first, and their losses by folder name."""
    if rules.keep <= 0:
        return []
    kept = {step.name for step in steps[: rules.keep]}
    if rules.keep_every > 0:
        kept |= {step.name for step in steps if step.step % rules.keep_every == 0}
    if rules.keep_best > 0:
        kept |= set(sorted(losses, key=lambda name: (losses[name], name))[: rules.keep_best])
    return [step for step in steps if step.name not in kept]


def removable(store: Store, rules: Rules, note: Callable[[str], None], elsewhere: bool = False) -> list[str]:
    """Names of the steps that may go now, oldest first. None, unless a step that stays is whole.

    `elsewhere` says that some files lie on other nodes: those cannot be looked at from here.
    """
    steps = commit.committed_steps(store)
    losses = _losses(store, steps) if rules.keep_best > 0 else {}
    doomed = surplus(steps, rules, losses)
    if not doomed:
        return []
    gone = {step.name for step in doomed}
    problem = None
    for step in (step for step in steps if step.name not in gone):
        problem = quick_problem(store, step, elsewhere)
        if problem is None:
            break
    else:
        note(f"no old checkpoint is removed, because none of the newer ones is whole: {problem}")
        return []
    free = []
    for step in reversed(doomed):
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


def quick_problem(store: Store, step: StepFolder, elsewhere: bool = False) -> str | None:
    """None when manifest, file sizes and headers are as they were written: the check before an older step may go."""
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


def _losses(store: Store, steps: Sequence[StepFolder]) -> dict[str, float]:
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


@contextmanager
def reading(store: Store, folder: str) -> Iterator[None]:
    """While this lasts no retention removes the step (where we may write beside it; elsewhere we can only read)."""
    name = f"{folder}/{READING}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    written = False
    with suppress(OSError):
        # In a folder that is gone already a note would only be the rest of a step that nobody clears away.
        if MARKER in store.names(folder):
            store.create(name, json.dumps({"time": time.time()}).encode())
            written = True
    try:
        yield
    finally:
        if written:
            with suppress(OSError):
                store.remove(name)


def being_read(store: Store, folder: str) -> bool:
    """Whether somebody said so, and not too long ago."""
    for name in store.names(folder):
        if name.startswith(READING):
            with suppress(OSError, ValueError, KeyError, TypeError):
                if time.time() - json.loads(store.read(f"{folder}/{name}"))["time"] < READING_EXPIRES_S:
                    return True
    return False


@contextmanager
def writing(store: Store, folder: str) -> Iterator[None]:
    """While this lasts, `abandoned` does not take the step for one that a killed job left half written."""
    name = f"{folder}/{WRITING}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    note = {"time": time.time(), "machine": _machine(), "pid": os.getpid()}
    # The save is worth more than the note: what keeps it from being written may not matter to the save.
    with suppress(OSError, CheckpointError):
        store.create(name, json.dumps(note).encode())
    try:
        yield
    finally:
        with suppress(OSError, CheckpointError):
            store.remove(name)


def abandoned(store: Store, note: Callable[[str], None]) -> Iterator[str]:
    """Steps that were never committed and that nobody is writing any more; `note` hears of the others."""
    for folder in commit.leftovers(store):
        if being_written(store, folder):
            note(f"{folder} is being written and stays")
        else:
            yield folder


def being_written(store: Store, folder: str) -> bool:
    """Whether a writer said so, and may still be at it."""
    for name in store.names(folder):
        if name.startswith(WRITING):
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(store.read(f"{folder}/{name}"))
                lives = told["machine"] != _machine() or Path(f"/proc/{int(told['pid'])}").exists()
                if lives and time.time() - told["time"] < WRITING_EXPIRES_S:
                    return True
    return False


def _machine() -> str:
    """Where a process number means one and the same process: this boot of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
