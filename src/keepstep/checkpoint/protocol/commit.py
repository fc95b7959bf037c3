"""The commit protocol: data files, then part files, then the manifest, then the marker, then `latest`. No torch.

Every rank writes its data file and, once that is on disk, a part file that describes it. The committing rank waits for
the parts of all ranks, proves that they cover every tensor, and publishes. File names carry a random token of the
attempt, so a writer left over from a killed job cannot mix its files with those of a new job for the same step.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from keepstep.checkpoint.protocol.lease import NO_FENCE, Fence
from keepstep.checkpoint.protocol.manifest import (
    BEST_ALGORITHM,
    LATEST,
    OLDER_STEP,
    Algorithm,
    CommittedCheckpoint,
    FileEntry,
    Manifest,
    Marker,
    Piece,
    TensorEntry,
    check_coverage,
    decode_manifest,
    decode_marker,
    encode_manifest,
    encode_marker,
    hasher,
)
from keepstep.checkpoint.protocol.shards import PieceSpec, shard_header
from keepstep.checkpoint.storage.store import Store, unreadable
from keepstep.core import failpoints
from keepstep.core.errors import CheckpointError
from keepstep.core.step_folders import MARKER, folder_name, parse_folder_name


class Peers(Protocol):
    """Sends copies to other nodes when every node writes to its own disk (see node_local/replicas.py)."""

    def send_data(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Copy a data file to another node; return when it is on disk there."""

    def send_part(self, name: str, content: bytes) -> bool:
        """Send the part file to the committing node; False when this node commits."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at saving one step, the same on every rank."""

    step: int
    sequence: int
    folder: str
    token: str
    world_size: int
    algorithm: Algorithm

    def file_name(self, rank: int) -> str:
        """The data file of a rank."""
        return f"rank{rank:05d}-{self.token}.safetensors"

    def part_name(self, rank: int) -> str:
        """The part file of a rank; it exists once the rank's data file is on disk."""
        return f"rank{rank:05d}-{self.token}.part.json"


def committed_steps(
    store: Store, on_damage: Callable[[CheckpointError], None] = lambda _: None
) -> list[CommittedCheckpoint]:
    """All committed steps, newest commit first; a damaged marker is reported to `on_damage` and skipped."""
    found = []
    for name in filter(parse_folder_name, store.names()):
        try:
            found.append(read_step(store, name))
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            on_damage(error)
    return newest_first(found)


def newest_first(steps: Iterable[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
    """Sorted by the time of the commit, not by the step: a run may have gone back."""
    return sorted(steps, key=lambda step: (step.marker.sequence, parse_folder_name(step.name)), reverse=True)


def read_step(store: Store, name: str) -> CommittedCheckpoint:
    """The step in one folder; FileNotFoundError when it was not committed."""
    where = f"{name}/{MARKER}"
    try:
        content = store.read(where)
    except NotADirectoryError as error:
        raise FileNotFoundError(where) from error
    marker = decode_marker(content, store.locate(where))
    parsed = parse_folder_name(name)
    if parsed is not None and parsed[0] != marker.step:
        raise CheckpointError(
            f"{store.locate(where)} is the marker of step {marker.step}: it was copied from another folder",
            "copy the whole folder of a step, and keep its name",
        )
    return CommittedCheckpoint(name, marker)


def read_manifest(store: Store, step: CommittedCheckpoint) -> Manifest:
    """The manifest of a committed step, checked against its marker and for coverage."""
    name = f"{step.name}/{step.marker.manifest}"
    where = store.locate(name)
    try:
        content = store.read(name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is missing", OLDER_STEP) from error
    except OSError as error:
        raise unreadable(error, where) from error
    if hasher(step.marker.algorithm)(content) != step.marker.manifest_hash:
        raise CheckpointError(f"{where} is damaged: its hash differs from the one in the marker", OLDER_STEP)
    return decode_manifest(content, where)


def new_attempt(
    store: Store, step: int, world_size: int, sequence: int, algorithm: Algorithm = BEST_ALGORITHM
) -> Attempt:
    """A new attempt to save `step`, in a folder that is never a committed one."""
    number = 0
    while MARKER in store.names(folder_name(step, number)):
        number += 1
    return Attempt(step, sequence, folder_name(step, number), secrets.token_hex(4), world_size, algorithm)


def newest_sequence(store: Store) -> int:
    """The sequence number of the newest commit; 0 when there is none."""
    return max((step.marker.sequence for step in committed_steps(store)), default=0)


def write_part(
    store: Store,
    attempt: Attempt,
    rank: int,
    specs: list[PieceSpec],
    data: memoryview | Callable[[PieceSpec], memoryview],
    extra: Mapping[str, Any],
    threads: int = 1,
    peers: Peers | None = None,
) -> None:
    """Write one rank's data file, then its part file. `extra` goes into the part file (rank values, tensors held).

    `data` is one buffer with all pieces, or a function that reads one: it is called twice, to hash and to write.
    """
    failpoints.reach("before_data")
    read = data if callable(data) else lambda spec: data[spec.begin : spec.begin + spec.size_bytes]
    pieces = map(data, specs) if callable(data) else [data]
    header = shard_header(specs, read, attempt.algorithm, threads)
    name = attempt.file_name(rank)
    store.write(f"{attempt.folder}/{name}", chain([memoryview(header)], pieces))
    failpoints.reach("after_data")
    if peers is not None:
        peers.send_data(f"{attempt.folder}/{name}", [memoryview(header), *pieces])
    size_bytes = len(header) + sum(spec.size_bytes for spec in specs)
    file = [name, size_bytes, len(header), hasher(attempt.algorithm)(header)]
    announce(store, attempt, rank, {**extra, "file": file, "pieces": [spec.to_json() for spec in specs]}, peers)
    failpoints.reach("after_part")


def announce(store: Store, attempt: Attempt, rank: int, part: Mapping[str, Any], peers: Peers | None = None) -> None:
    """Write the part file where the committing rank looks for it; `{"error": ...}` means: do not wait for this rank."""
    name, content = f"{attempt.folder}/{attempt.part_name(rank)}", json.dumps(part, separators=(",", ":")).encode()
    if peers is None or not peers.send_part(name, content):
        store.create(name, content)


def await_parts(store: Store, attempt: Attempt, stop: Callable[[], bool], timeout_s: float) -> list[dict[str, Any]]:
    """Wait for the part files of all ranks; returns their content in rank order."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    waiting = {attempt.part_name(rank): rank for rank in range(attempt.world_size)}
    parts: dict[int, dict[str, Any]] = {}
    while True:
        for name in set(store.names(attempt.folder)) & set(waiting):
            content = store.read(f"{attempt.folder}/{name}")
            if not content:
                continue  # without hard links the name appears before its content
            rank, part = waiting.pop(name), json.loads(content)
            if "error" in part:
                raise CheckpointError(f"step {attempt.step} is not committed: rank {rank} failed: {part['error']}")
            parts[rank] = part
        if not waiting:
            return [parts[rank] for rank in range(attempt.world_size)]
        missing = sorted(waiting.values())
        if stop():
            raise CheckpointError(f"step {attempt.step} is not committed: stopped while ranks {missing} were writing")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"step {attempt.step} is not committed: ranks {missing} did not finish in {timeout_s:.0f} s"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)


def compose(
    attempt: Attempt, parts: list[dict[str, Any]], values: Mapping[str, Any], metadata: Mapping[str, Any]
) -> Manifest:
    """Build the manifest from the parts of all ranks, and prove that every tensor is complete."""
    tensors: dict[str, TensorEntry] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, part in enumerate(parts):
        # Tensors held are listed even where another rank writes them, so that one that nobody wrote is noticed.
        for name, (dtype, shape) in part["holds"].items():
            entry = tensors.setdefault(name, TensorEntry(dtype, tuple(shape), ()))
            if (entry.dtype, entry.shape) != (dtype, tuple(shape)):
                raise CheckpointError(
                    f"tensor {name} is {dtype} {list(shape)} on rank {rank} and "
                    f"{entry.dtype} {list(entry.shape)} elsewhere"
                )
        for raw in part["pieces"]:
            spec = PieceSpec.from_json(raw)
            pieces.setdefault(spec.tensor, []).append(Piece(spec.tensor_slice, rank, spec.begin))
    manifest = Manifest(
        step=attempt.step,
        sequence=attempt.sequence,
        time=time.time(),
        world_size=attempt.world_size,
        algorithm=attempt.algorithm,
        files=tuple(FileEntry(*part["file"]) for part in parts),
        tensors={name: replace(tensors[name], pieces=tuple(pieces.get(name, ()))) for name in sorted(tensors)},
        values=values,
        rank_values={rank: part["rank_values"] for rank, part in enumerate(parts) if part["rank_values"]},
        metadata=metadata,
    )
    check_coverage(manifest, f"step {attempt.step}")
    return manifest


def publish(
    store: Store,
    attempt: Attempt,
    manifest: Manifest,
    elsewhere: bool = False,
    note: Callable[[str], None] = lambda _: None,
    fence: Fence = NO_FENCE,
) -> CommittedCheckpoint:
    """Commit the step: write the manifest, the marker (only if absent) and `latest`, then delete the part files.

    `elsewhere` means that files of other ranks may be on other nodes. The step exists once the marker is written:
    an error after that does not fail the save and is passed to `note`. RunTakenError when `fence` is outdated.
    """
    here = set(store.names(attempt.folder))
    for file in manifest.files:
        if elsewhere and file.name not in here:
            continue
        size = store.size(f"{attempt.folder}/{file.name}")
        if size != file.size_bytes:
            where = f"{store.locate(attempt.folder)}/{file.name}"
            raise CheckpointError(f"{where} has {size} bytes instead of {file.size_bytes}")
    content = encode_manifest(replace(manifest, fence=fence.number))
    name = f"manifest-{attempt.token}.json"
    failpoints.reach("before_manifest")
    store.create(f"{attempt.folder}/{name}", content)
    failpoints.reach("after_manifest")
    marker = Marker(
        step=attempt.step,
        sequence=attempt.sequence,
        time=manifest.time,
        world_size=attempt.world_size,
        algorithm=attempt.algorithm,
        manifest=name,
        manifest_hash=hasher(attempt.algorithm)(content),
        data_bytes=manifest.data_bytes,
    )
    _mark(store, attempt.folder, encode_marker(marker), fence)
    failpoints.reach("after_marker")
    try:
        store.replace(LATEST, f"{attempt.folder}\n".encode())
        failpoints.reach("after_latest")
        for rank in range(attempt.world_size):
            store.remove(f"{attempt.folder}/{attempt.part_name(rank)}")
    except (OSError, CheckpointError) as error:
        note(f"the step is committed, but cleaning up after it failed: {error}")
    return CommittedCheckpoint(attempt.folder, marker)


def _mark(store: Store, folder: str, content: bytes, fence: Fence) -> None:
    """Write the marker, unless there is one."""
    name = f"{folder}/{MARKER}"
    try:
        store.create(name, content, fence.check)
    except OSError as error:
        # The request may have succeeded although its answer was lost: what counts is the marker that is there now.
        try:
            present = store.read(name)
        except OSError:
            raise error from None
        if present != content:
            raise CheckpointError(f"{store.locate(folder)} was committed by another writer meanwhile") from error


def remove_uncommitted(store: Store, name: str) -> bool:
    """Delete a step that was not committed; False, with nothing deleted, if it has been committed meanwhile."""
    if MARKER in store.names(name):
        return False
    store.remove_folder(name)
    return True


def uncommitted_folders(store: Store) -> Iterator[str]:
    """Step folders without a marker: a save is under way, or its job was killed."""
    return (name for name in filter(parse_folder_name, store.names()) if MARKER not in store.names(name))
