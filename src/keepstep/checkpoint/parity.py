"""Parity: one extra file from which any one lost or damaged data file of its group can be rebuilt. No torch.

The parity file is the exclusive or of the group's data files, each taken as padded with zeros. Groups have at most
eight files, so the cost is an eighth of the checkpoint in a large job (and a full copy when there is a single file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keepstep.checkpoint import commit
from keepstep.checkpoint.hashing import hasher
from keepstep.checkpoint.manifest import FileEntry, Manifest, StepFolder, safe_name
from keepstep.checkpoint.shards import ShardReader
from keepstep.checkpoint.store import Store
from keepstep.core.errors import CheckpointError

GROUP_FILES = 8
STRIPE_BYTES = 4 * 1024 * 1024


def _xor_stripes(store: Store, folder: str, files: Sequence[tuple[str, int]], total_bytes: int) -> Iterator[bytes]:
    """The exclusive or of files (name, size), a stripe at a time."""
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
        yield stripe.tobytes()


def add(store: Store, folder: str, token: str, manifest: Manifest) -> Manifest:
    """Write a parity file for each group of data files; the manifest that names them."""
    groups: list[dict[str, Any]] = []
    digest = hasher(manifest.algorithm)
    for number, start in enumerate(range(0, len(manifest.files), GROUP_FILES)):
        members = manifest.files[start : start + GROUP_FILES]
        total_bytes = max(file.size_bytes for file in members)
        name = f"parity{number:05d}-{token}.bin"
        stripe_hashes: list[str] = []

        def stripes(
            members: Sequence[FileEntry] = members, total: int = total_bytes, seen: list[str] = stripe_hashes
        ) -> Iterator[memoryview]:
            for stripe in _xor_stripes(store, folder, [(file.name, file.size_bytes) for file in members], total):
                seen.append(digest(stripe))
                yield memoryview(stripe)

        store.write(f"{folder}/{name}", stripes())
        groups.append(
            {
                "name": name,
                "bytes": total_bytes,
                "files": list(range(start, start + len(members))),
                "hashes": stripe_hashes,
            }
        )
    return replace(manifest, parity=tuple(groups))


def parity_problem(store: Store, folder: str, manifest: Manifest, group: Mapping[str, Any]) -> str | None:
    """None when the parity file is as it was written."""
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
    except (OSError, CheckpointError) as error:
        return f"{store.locate(folder)}/{name} cannot be read: {error}"
    return None


def file_problem(store: Store, folder: str, manifest: Manifest, index: int) -> str | None:
    """None when every byte of a data file is as it was written; else what is wrong, with the file's name."""
    try:
        reader = ShardReader(store, folder, manifest.files[index], manifest.algorithm)
        reader.check_all()
    except CheckpointError as error:
        return error.message
    return None


def rebuild(store: Store, step: StepFolder, manifest: Manifest, index: int) -> None:
    """Make one data file again from its group; the result is checked against its hashes before it counts."""
    file = manifest.files[index]
    group = next((group for group in manifest.parity if index in group["files"]), None)
    if group is None:
        raise CheckpointError(
            f"{store.locate(step.name)}/{file.name} cannot be rebuilt: the step was saved without parity",
            "checkpoint.parity=1 writes it from the next save on",
        )
    others = [manifest.files[other] for other in group["files"] if other != index]
    sources = [(other.name, other.size_bytes) for other in others] + [(safe_name(group["name"]), int(group["bytes"]))]
    target = f"{step.name}/{file.name}"
    aside = replace(file, name=f"rebuilt-{file.name}")
    store.remove(f"{step.name}/{aside.name}")

    def pieces() -> Iterator[memoryview]:
        for stripe in _xor_stripes(store, step.name, sources, file.size_bytes):
            yield memoryview(stripe)

    try:
        store.write(f"{step.name}/{aside.name}", pieces())
        ShardReader(store, step.name, aside, manifest.algorithm).check_all()
    except (OSError, CheckpointError) as error:
        # The damaged original stays where it is: what is left of it may still be worth something to a person.
        store.remove(f"{step.name}/{aside.name}")
        raise CheckpointError(
            f"{store.locate(target)} cannot be rebuilt: more than one file of its group is damaged ({error})"
        ) from error
    store.move(f"{step.name}/{aside.name}", target)


def mend(store: Store, step: StepFolder) -> tuple[list[str], list[str]]:
    """Check every file of a step and rebuild what can be rebuilt; returns what was found and the names rebuilt."""
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
            rebuild_parity(store, step, manifest, group)
            rebuilt.append(group["name"])
    return problems, rebuilt


def rebuild_parity(store: Store, step: StepFolder, manifest: Manifest, group: Mapping[str, Any]) -> None:
    """Write a parity file again from data files that are all whole."""
    members = [(manifest.files[index].name, manifest.files[index].size_bytes) for index in group["files"]]
    aside = f"{step.name}/rebuilt-{safe_name(group['name'])}"
    store.remove(aside)
    store.write(aside, (memoryview(s) for s in _xor_stripes(store, step.name, members, int(group["bytes"]))))
    store.move(aside, f"{step.name}/{group['name']}")
