"""The commit protocol: data files, then part files, then the manifest, then the marker, then `latest`. No torch here.

Every rank writes its data file and, once that is on disk, a part file that describes it. Whoever commits waits for the
parts of all ranks, proves that they cover every tensor, and publishes. Names carry a random token of this attempt, so a
writer left over from a killed job can neither spoil nor mix with what a new job writes for the same step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from keepstep.checkpoint import failpoints
from keepstep.checkpoint.hashing import Algorithm, block_hashes, hasher
from keepstep.checkpoint.manifest import (
    LATEST,
    MARKER,
    FileEntry,
    Manifest,
    Marker,
    Piece,
    StepFolder,
    TensorEntry,
    check_coverage,
    decode_manifest,
    decode_marker,
    encode_manifest,
    encode_marker,
    folder_name,
    parse_folder_name,
)
from keepstep.checkpoint.shards import PieceSpec, block_size, encode_header, shard_header
from keepstep.checkpoint.store import Store, unreadable
from keepstep.core.errors import CheckpointError


class Peers(Protocol):
    """Where copies go when every node writes to a disk of its own (see peers.py)."""

    def send_data(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Copy a data file to another node; returns when it is on disk there."""

    def send_part(self, name: str, content: bytes) -> bool:
        """Hand the part file to the committing node; False when that is this node."""


@dataclass(frozen=True)
class Attempt:
    """One try at writing one step, the same on every rank."""

    step: int
    sequence: int
    folder: str
    token: str
    world_size: int
    algorithm: Algorithm

    def file_name(self, rank: int) -> str:
        """A rank's data file."""
        return f"rank{rank:05d}-{self.token}.safetensors"

    def part_name(self, rank: int) -> str:
        """A rank's word that its data file is on disk."""
        return f"rank{rank:05d}-{self.token}.part.json"


def committed_steps(store: Store, on_damage: Callable[[CheckpointError], None] | None = None) -> list[StepFolder]:
    """All committed steps, the newest commit first; a damaged marker is reported and passed over."""
    found = []
    for name in store.names():
        parsed = parse_folder_name(name)
        if parsed is None:
            continue
        try:
            step = read_step(store, name)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            if on_damage is not None:
                on_damage(error)
            continue
        found.append((step.marker.sequence, parsed, step))
    return [step for _, _, step in sorted(found, key=lambda item: item[:2], reverse=True)]


def read_step(store: Store, name: str) -> StepFolder:
    """The step in one folder; FileNotFoundError when it was never committed."""
    where = f"{name}/{MARKER}"
    try:
        content = store.read(where)
    except NotADirectoryError as error:
        raise FileNotFoundError(where) from error
    marker = decode_marker(content, store.locate(where))
    parsed = parse_folder_name(name)
    if parsed is not None and parsed[0] != marker.step:
        raise CheckpointError(
            f"{store.locate(where)} is the marker of step {marker.step}: it was put here from elsewhere"
        )
    return StepFolder(name, marker)


def read_manifest(store: Store, step: StepFolder) -> Manifest:
    """The manifest of a committed step, checked against its marker and for coverage."""
    name = f"{step.name}/{step.marker.manifest}"
    where = store.locate(name)
    try:
        content = store.read(name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is missing") from error
    except OSError as error:
        raise unreadable(error, where) from error
    if hasher(step.marker.algorithm)(content) != step.marker.manifest_hash:
        raise CheckpointError(f"{where} is damaged: its marker holds another hash")
    return decode_manifest(content, where)


def free_folder(store: Store, step: int) -> str:
    """The folder for a new save of `step`: never one that is committed."""
    attempt = 0
    while MARKER in store.names(folder_name(step, attempt)):
        attempt += 1
    return folder_name(step, attempt)


def write_part(
    store: Store,
    attempt: Attempt,
    rank: int,
    specs: list[PieceSpec],
    data: memoryview,
    extra: Mapping[str, Any],
    threads: int = 1,
    peers: Peers | None = None,
) -> None:
    """One rank's share: its data file, then its part file. `extra` goes into the part (rank values, names held)."""
    failpoints.reach("before_data")
    header = shard_header(specs, data, attempt.algorithm, threads)
    name, pieces = attempt.file_name(rank), [memoryview(header), data]
    store.write(f"{attempt.folder}/{name}", pieces)
    failpoints.reach("after_data")
    if peers is not None:
        peers.send_data(f"{attempt.folder}/{name}", pieces)
    part = {
        **extra,
        "file": [name, len(header) + len(data), len(header), hasher(attempt.algorithm)(header)],
        "pieces": [spec.to_json() for spec in specs],
    }
    announce(store, attempt, rank, part, peers)
    failpoints.reach("after_part")


def stream_part(
    store: Store,
    attempt: Attempt,
    rank: int,
    specs: list[PieceSpec],
    read: Callable[[PieceSpec], memoryview],
    extra: Mapping[str, Any],
) -> None:
    """`write_part` without a buffer of the whole share: each piece is read once to be hashed and once to be written."""
    data_bytes = sum(spec.size_bytes for spec in specs)
    block_bytes = block_size(data_bytes)
    blocks = "".join(digest for spec in specs for digest in block_hashes(attempt.algorithm, read(spec), block_bytes))
    header = encode_header(specs, block_bytes, attempt.algorithm, blocks)
    name = attempt.file_name(rank)
    store.write(f"{attempt.folder}/{name}", chain([memoryview(header)], map(read, specs)))
    file = [name, len(header) + data_bytes, len(header), hasher(attempt.algorithm)(header)]
    announce(store, attempt, rank, {**extra, "file": file, "pieces": [spec.to_json() for spec in specs]})


def announce(store: Store, attempt: Attempt, rank: int, part: Mapping[str, Any], peers: Peers | None = None) -> None:
    """Leave the part file where the committing rank looks for it; `{"error": ...}` tells it not to wait for us."""
    name, content = f"{attempt.folder}/{attempt.part_name(rank)}", json.dumps(part, separators=(",", ":")).encode()
    if peers is None or not peers.send_part(name, content):
        store.create(name, content)


def await_parts(store: Store, attempt: Attempt, stop: Callable[[], bool], timeout_s: float) -> list[dict[str, Any]]:
    """The parts of all ranks, in rank order, as soon as they are there."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    waiting = {attempt.part_name(rank): rank for rank in range(attempt.world_size)}
    parts: dict[int, dict[str, Any]] = {}
    while True:
        for name in set(store.names(attempt.folder)) & set(waiting):
            rank = waiting.pop(name)
            part = json.loads(store.read(f"{attempt.folder}/{name}"))
            if "error" in part:
                raise CheckpointError(f"step {attempt.step} is not committed: rank {rank} failed: {part['error']}")
            parts[rank] = part
        if not waiting:
            return [parts[rank] for rank in range(attempt.world_size)]
        missing = sorted(waiting.values())
        if stop():
            raise CheckpointError(f"step {attempt.step} is not committed: given up while ranks {missing} were writing")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"step {attempt.step} is not committed: ranks {missing} did not finish in {timeout_s:.0f} s"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)


def compose(
    attempt: Attempt, parts: list[dict[str, Any]], values: Mapping[str, Any], metadata: Mapping[str, Any]
) -> Manifest:
    """One manifest from the parts of all ranks, with every tensor that any rank holds proven whole."""
    tensors: dict[str, TensorEntry] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, part in enumerate(parts):
        # What a rank holds counts even where another writes it: a tensor that nobody wrote must not go unnoticed.
        for name, (dtype, shape) in part["holds"].items():
            entry = tensors.setdefault(name, TensorEntry(dtype, tuple(shape), ()))
            if (entry.dtype, entry.shape) != (dtype, tuple(shape)):
                raise CheckpointError(
                    f"tensor {name} is {dtype} {list(shape)} on rank {rank} and "
                    f"{entry.dtype} {list(entry.shape)} elsewhere"
                )
        for raw in part["pieces"]:
            spec = PieceSpec.from_json(raw)
            pieces.setdefault(spec.tensor, []).append(Piece(spec.box, rank, spec.begin))
    manifest = Manifest(
        step=attempt.step,
        sequence=attempt.sequence,
        time=time.time(),
        world_size=attempt.world_size,
        algorithm=attempt.algorithm,
        files=tuple(FileEntry(*part["file"]) for part in parts),
        tensors={
            name: TensorEntry(entry.dtype, entry.shape, tuple(pieces.get(name, ())))
            for name, entry in sorted(tensors.items())
        },
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
) -> StepFolder:
    """Make the step exist: manifest, marker (only if there is none), `latest`; then drop the part files.

    `elsewhere` says that other ranks' files may lie on other nodes, where they were written before their parts came.
    With the marker the step exists: what goes wrong after it is no failure of the save, and goes to `note`.
    """
    here = set(store.names(attempt.folder))
    for file in manifest.files:
        if elsewhere and file.name not in here:
            continue
        size = store.size(f"{attempt.folder}/{file.name}")
        if size != file.size_bytes:
            raise CheckpointError(
                f"{store.locate(attempt.folder)}/{file.name} has {size} bytes instead of {file.size_bytes}"
            )
    content = encode_manifest(manifest)
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
    _mark(store, attempt.folder, encode_marker(marker))
    failpoints.reach("after_marker")
    try:
        store.replace(LATEST, f"{attempt.folder}\n".encode())
        failpoints.reach("after_latest")
        for rank in range(attempt.world_size):
            store.remove(f"{attempt.folder}/{attempt.part_name(rank)}")
    except (OSError, CheckpointError) as error:
        note(f"the step is committed, but not all was tidied up after it: {error}")
    return StepFolder(attempt.folder, marker)


def _mark(store: Store, folder: str, content: bytes) -> None:
    """Put the marker, the first and only one."""
    name = f"{folder}/{MARKER}"
    try:
        store.create(name, content)
    except OSError as error:
        # The answer may have been lost on its way, and asking again finds our own marker: what counts is what is there.
        try:
            present = store.read(name)
        except OSError:
            raise error from None
        if present != content:
            raise CheckpointError(f"{store.locate(folder)} was committed by another writer in the meantime") from error


def remove_leftover(store: Store, name: str) -> bool:
    """Delete a step that was never committed; False, and nothing deleted, where it has been in the meantime."""
    if MARKER in store.names(name):
        return False
    store.remove_folder(name)
    return True


def leftovers(store: Store) -> Iterator[str]:
    """Step folders that were never committed: a job was killed while it wrote them."""
    for name in store.names():
        if parse_folder_name(name) is not None and MARKER not in store.names(name):
            yield name
