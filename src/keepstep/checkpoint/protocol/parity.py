"""Parity: one extra file from which any one lost or damaged data file of its group can be rebuilt. No torch.

The parity file is the XOR of the group's data files, padded with zeros to equal length. A group has at most eight
files, so parity adds an eighth to the checkpoint of a large job (and doubles it when there is a single file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keepstep.checkpoint.protocol import commit
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint, Manifest, hasher, safe_name
from keepstep.checkpoint.protocol.shards import ShardReader
from keepstep.checkpoint.storage.store import Store
from keepstep.core.errors import CheckpointError

GROUP_FILES = 8
STRIPE_BYTES = 4 * 1024 * 1024


def _xor_stripes(store: Store, folder: str, files: Sequence[tuple[str, int]], total_bytes: int) -> Iterator[memoryview]:
    """The XOR of files given as (name, size), one stripe at a time."""
    import numpy as np

    staged = bytearray(STRIPE_BYTES)
    for start in range(0, total_bytes, STRIPE_BYTES):
        length = min(STRIPE_BYTES, total_bytes - start)
        stripe = np.zeros(length, dtype=np.uint8)
        for name, size_bytes in files:
            wanted = min(length, size_bytes - start)
            if wanted > 0:
                view = memoryview(staged)[:wanted]
                if store.read_into(f"{folder}/{name}", start, view) != wanted:
                    raise CheckpointError(f"{store.locate(folder)}/{name} is shorter than {size_bytes} bytes")
                stripe[:wanted] ^= np.frombuffer(view, dtype=np.uint8)
        yield memoryview(stripe.tobytes())


def _write(store: Store, folder: str, name: str, manifest: Manifest, members: Sequence[int], size: int) -> list[str]:
    """Write the parity file of these data files; returns the hashes of its stripes."""
    digest = hasher(manifest.algorithm)
    hashes: list[str] = []

    def stripes() -> Iterator[memoryview]:
        files = [(manifest.files[index].name, manifest.files[index].size_bytes) for index in members]
        for stripe in _xor_stripes(store, folder, files, size):
            hashes.append(digest(stripe))
            yield stripe

    store.write(f"{folder}/{name}", stripes())
    return hashes


def add(store: Store, folder: str, token: str, manifest: Manifest) -> Manifest:
    """Write a parity file for each group of data files; returns the manifest that lists them."""
    groups: list[dict[str, Any]] = []
    for number, start in enumerate(range(0, len(manifest.files), GROUP_FILES)):
        members = list(range(start, min(start + GROUP_FILES, len(manifest.files))))
        size = max(manifest.files[index].size_bytes for index in members)
        name = f"parity{number:05d}-{token}.bin"
        hashes = _write(store, folder, name, manifest, members, size)
        groups.append({"name": name, "bytes": size, "files": members, "hashes": hashes})
    return replace(manifest, parity=tuple(groups))


def parity_problem(store: Store, folder: str, manifest: Manifest, group: Mapping[str, Any]) -> str | None:
    """None when the parity file is intact; else what is wrong."""
    digest = hasher(manifest.algorithm)
    name = safe_name(group["name"])
    try:
        if store.size(f"{folder}/{name}") != group["bytes"]:
            return f"{store.locate(folder)}/{name} has the wrong size"
        for stripe, expected in zip(
            _xor_stripes(store, folder, [(name, group["bytes"])], group["bytes"]), group["hashes"], strict=True
        ):
            if digest(stripe) != expected:
                return f"{store.locate(folder)}/{name} is damaged"
    except FileNotFoundError:
        return f"{store.locate(folder)}/{name} is missing"
    except (OSError, ValueError, CheckpointError) as error:
        return f"{store.locate(folder)}/{name} cannot be read: {error}"
    return None


def file_problem(store: Store, folder: str, manifest: Manifest, index: int) -> str | None:
    """None when every byte of a data file is intact; else what is wrong, with the file's name."""
    try:
        ShardReader(store, folder, manifest.files[index], manifest.algorithm).check_all()
    except CheckpointError as error:
        return error.message
    return None


def rebuild(store: Store, step: CommittedCheckpoint, manifest: Manifest, index: int) -> None:
    """Rebuild one data file from its group; it replaces the damaged file only if its hashes match."""
    file = manifest.files[index]
    group = next((group for group in manifest.parity if index in group["files"]), None)
    if group is None:
        raise CheckpointError(
            f"{store.locate(step.name)}/{file.name} cannot be rebuilt: the step was saved without parity",
            "checkpoint.parity=1 adds parity from the next save on",
        )
    others = [manifest.files[other] for other in group["files"] if other != index]
    sources = [(other.name, other.size_bytes) for other in others] + [(safe_name(group["name"]), int(group["bytes"]))]
    target = f"{step.name}/{file.name}"
    aside = replace(file, name=f"rebuilt-{file.name}")
    store.remove(f"{step.name}/{aside.name}")
    try:
        store.write(f"{step.name}/{aside.name}", _xor_stripes(store, step.name, sources, file.size_bytes))
        ShardReader(store, step.name, aside, manifest.algorithm).check_all()
    except (OSError, CheckpointError) as error:
        # Keep the damaged original: a person may still recover something from it.
        store.remove(f"{step.name}/{aside.name}")
        raise CheckpointError(
            f"{store.locate(target)} cannot be rebuilt: more than one file of its group is damaged ({error})",
            "resume from an older step: keepstep ckpt ls RUN lists them",
        ) from error
    store.move(f"{step.name}/{aside.name}", target)


def repair(store: Store, step: CommittedCheckpoint) -> tuple[list[str], list[str]]:
    """Check every file of a step and rebuild damaged ones; returns the problems found and the files rebuilt."""
    manifest = commit.read_manifest(store, step)
    problems, rebuilt = [], []
    for index, file in enumerate(manifest.files):
        problem = file_problem(store, step.name, manifest, index)
        if problem:
            problems.append(problem)
            rebuild(store, step, manifest, index)
            rebuilt.append(file.name)
    for group in manifest.parity:
        problem = parity_problem(store, step.name, manifest, group)
        if problem:
            problems.append(problem)
            # All data files are intact now.
            aside = f"rebuilt-{safe_name(group['name'])}"
            store.remove(f"{step.name}/{aside}")
            _write(store, step.name, aside, manifest, group["files"], int(group["bytes"]))
            store.move(f"{step.name}/{aside}", f"{step.name}/{group['name']}")
            rebuilt.append(group["name"])
    return problems, rebuilt
