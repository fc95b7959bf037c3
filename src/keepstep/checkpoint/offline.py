"""Steps without a training job: whole tensors out of a step, a step out of whole tensors. For tools and conversion."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.checkpoint import commit, parity
from keepstep.checkpoint.boxes import Box, whole
from keepstep.checkpoint.commit import Attempt
from keepstep.checkpoint.hashing import Algorithm, best_algorithm
from keepstep.checkpoint.layout import DTYPE_NAMES, DTYPES, Holding
from keepstep.checkpoint.manifest import Manifest, StepFolder
from keepstep.checkpoint.restore import bytes_of, fill
from keepstep.checkpoint.shards import ShardReader, lay_out
from keepstep.checkpoint.store import Store


class OpenStep:
    """A committed step to read single tensors from."""

    def __init__(self, store: Store, step: StepFolder) -> None:
        self.manifest: Manifest = commit.read_manifest(store, step)
        self._store = store
        self._folder = step.name
        self._readers: dict[int, ShardReader] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, whole and checked."""
        entry = self.manifest.tensors[name]
        target = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        held = Holding(name, entry.dtype, entry.shape, whole(entry.shape), target, None)
        for piece in entry.pieces:
            fill(self._reader(piece.file), held, piece, piece.box)
        return target

    def _reader(self, file: int) -> ShardReader:
        if file not in self._readers:
            entry = self.manifest.files[file]
            self._readers[file] = ShardReader(self._store, self._folder, entry, self.manifest.algorithm)
        return self._readers[file]


@dataclass(frozen=True)
class Content:
    """What a step holds, apart from how it is laid out."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    metadata: Mapping[str, Any]
    rank_values: Mapping[int, Any]


def read_content(store: Store, step: StepFolder, prefix: str = "") -> Content:
    """All of a step, or only the tensors whose names start with `prefix`, in memory."""
    source = OpenStep(store, step)
    manifest = source.manifest
    tensors = {name: source.tensor(name) for name in manifest.tensors if name.startswith(prefix)}
    return Content(manifest.step, tensors, manifest.values, manifest.metadata, manifest.rank_values)


def write_content(
    store: Store,
    content: Content,
    shards: int = 1,
    with_parity: bool = False,
    algorithm: Algorithm | None = None,
) -> StepFolder:
    """Commit `content` as a new step in `shards` data files, each with its rows of every tensor."""
    sequence = 1 + max((step.marker.sequence for step in commit.committed_steps(store)), default=0)
    folder = commit.free_folder(store, content.step)
    attempt = Attempt(content.step, sequence, folder, secrets.token_hex(4), shards, algorithm or best_algorithm())
    holds = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in content.tensors.items()}
    for shard in range(shards):
        memory = {
            (name, box): local
            for name, tensor in content.tensors.items()
            for box, local in [_rows(tensor, shard, shards)]
            if local.numel()
        }
        specs, size_bytes = lay_out([(name, *holds[name], box) for name, box in memory])
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        for spec in specs:
            target = buffer[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
            target.view(spec.box.shape).copy_(memory[spec.tensor, spec.box])
        extra = {"holds": holds, "rank_values": content.rank_values.get(shard, {})}
        commit.write_part(store, attempt, shard, specs, bytes_of(buffer), extra)
    parts = commit.await_parts(store, attempt, lambda: False, 1.0)
    manifest = commit.compose(attempt, parts, content.values, content.metadata)
    if with_parity:
        manifest = parity.add(store, folder, attempt.token, manifest)
    return commit.publish(store, attempt, manifest)


def _rows(tensor: torch.Tensor, shard: int, shards: int) -> tuple[Box, torch.Tensor]:
    """One shard's rows of a tensor; a scalar belongs to the first."""
    if not tensor.shape:
        return Box((), ()), tensor if shard == 0 else tensor.new_empty(0)
    rows = tensor.shape[0]
    first, last = rows * shard // shards, rows * (shard + 1) // shards
    local = tensor[first:last]
    return Box((first, *(0,) * (len(tensor.shape) - 1)), tuple(local.shape)), local
