"""What is in a checkpoint folder: steps, sizes and damage. For the command line; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.checkpoint.protocol.commit import committed_steps, read_manifest, read_step, uncommitted_folders
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint, Manifest
from keepstep.checkpoint.protocol.parity import file_problem, parity_problem
from keepstep.checkpoint.protocol.retention import being_written, reading
from keepstep.checkpoint.storage.store import Store, open_store
from keepstep.core.errors import CheckpointError
from keepstep.core.step_folders import MARKER, parse_folder_name


def open_place(place: str) -> tuple[Store, str | None]:
    """The store of a run folder, a checkpoint folder or a step folder, and the step's name if it is one."""
    parent, _, name = place.rstrip("/").rpartition("/")
    if parse_folder_name(name) is not None:
        steps = open_store(parent or ".")
        if name not in steps.names():
            raise CheckpointError(f"{place} does not exist", f"keepstep ckpt ls {parent or '.'} lists those that do")
        return steps, name
    store = open_store(place)
    names = store.names()
    if "checkpoints" in names:
        return open_store(f"{place.rstrip('/')}/checkpoints"), None
    if not names:
        raise CheckpointError(f"{place} does not exist or is empty", "give a run folder or its checkpoints folder")
    return store, None


def choose_step(place: str, step: int | None = None) -> tuple[Store, CommittedCheckpoint]:
    """One committed step of a place: the given one, or the newest."""
    store, name = open_place(place)
    if name is not None:
        try:
            return store, read_step(store, name)
        except FileNotFoundError as error:
            hint = "its save did not finish; keepstep ckpt ls RUN lists the steps that are complete"
            raise CheckpointError(f"{place} is not committed: it has no marker", hint) from error
    damages: list[CheckpointError] = []
    steps = [found for found in committed_steps(store, damages.append) if step is None or found.step == step]
    if not steps:
        if damages:
            raise damages[0]
        wanted = f" {step}" if step is not None else ""
        raise CheckpointError(f"{store.locate()} holds no committed step{wanted}", f"keepstep ckpt ls {place}")
    return store, steps[0]


def list_steps(store: Store) -> tuple[list[CommittedCheckpoint], list[str], dict[str, bool]]:
    """Committed steps, newest first; damaged markers; folders without a marker, and whether a process writes them."""
    damages: list[CheckpointError] = []
    steps = committed_steps(store, damages.append)
    uncommitted = {name: being_written(store, name) for name in uncommitted_folders(store)}
    return steps, [error.message for error in damages], uncommitted


def disk_usage(store: Store, only: str | None = None) -> dict[str, tuple[int, bool]]:
    """Bytes of each step folder, and whether it is committed."""
    sizes = {}
    for name in [only] if only else store.names():
        if parse_folder_name(name) is not None:
            files = store.names(name)
            sizes[name] = (sum(_size(store, f"{name}/{file}") for file in files), MARKER in files)
    return sizes


def _size(store: Store, name: str) -> int:
    """Bytes of a file; 0 if a running job has just removed it."""
    try:
        return store.size(name)
    except FileNotFoundError:
        return 0


def section_sizes(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Tensors and bytes by the first part of the tensors' names."""
    sections: dict[str, dict[str, int]] = {}
    for name, tensor in manifest.tensors.items():
        section = sections.setdefault(name.partition(".")[0], {"tensors": 0, "bytes": 0})
        section["tensors"] += 1
        section["bytes"] += tensor.size_bytes
    return sections


def verify(store: Store, steps: Sequence[CommittedCheckpoint]) -> tuple[dict[str, list[str]], list[str]]:
    """Read and check every byte; returns the problems of each step, and the steps that a running job deleted."""
    problems: dict[str, list[str]] = {}
    removed: list[str] = []
    for step in steps:
        found = step_problems(store, step)
        # Reading takes long, and a running job deletes old steps meanwhile, marker first.
        if found and MARKER not in store.names(step.name):
            removed.append(step.name)
        else:
            problems[step.name] = found
    return problems, removed


def step_problems(store: Store, step: CommittedCheckpoint) -> list[str]:
    """All damage of a step, each problem with its file name; empty when every byte matches its hash."""
    with reading(store, step.name):
        try:
            manifest = read_manifest(store, step)
        except CheckpointError as error:
            return [error.message]
        checks = [file_problem(store, step.name, manifest, index) for index in range(len(manifest.files))]
        checks += [parity_problem(store, step.name, manifest, group) for group in manifest.parity]
    return [problem for problem in checks if problem]
