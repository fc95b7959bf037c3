"""Steps without a training job: whole tensors out of a step, a step out of whole tensors. For tools and conversion."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
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
from keepstep.checkpoint.shards import PieceSpec, ShardReader, lay_out
from keepstep.checkpoint.store import Store

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


class Tensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read when it is asked for and kept by nobody; types and shapes are known before."""

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        read: Callable[[str], torch.Tensor],
        read_box: Callable[[str, Box], torch.Tensor] | None = None,
    ) -> None:
        self.kinds = kinds
        self._read = read
        self._read_box = read_box

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.kinds:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def part(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, without the rest of it where the source can do that."""
        if self._read_box is not None:
            return self._read_box(name, box)
        tensor = self[name]
        return tensor[box.within(whole(tensor.shape))] if tensor.shape else tensor


def in_memory(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors that are there already."""
    return Tensors({name: (item.dtype, tuple(item.shape)) for name, item in tensors.items()}, tensors.__getitem__)


class OpenStep:
    """A committed step to read single tensors from."""

    def __init__(self, store: Store, step: StepFolder) -> None:
        self.manifest: Manifest = commit.read_manifest(store, step)
        self._store = store
        self._folder = step.name
        self._readers: dict[int, ShardReader] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, whole and checked."""
        return self.part(name, whole(self.manifest.tensors[name].shape))

    def part(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, checked."""
        entry = self.manifest.tensors[name]
        target = torch.empty(box.shape, dtype=DTYPES[entry.dtype])
        held = Holding(name, entry.dtype, entry.shape, box, target, None)
        for piece in entry.pieces:
            common = piece.box.common(box)
            if common is not None:
                fill(self._reader(piece.file), held, piece, common)
        return target

    def tensors(self) -> Tensors:
        """All of them, read on demand."""
        kinds = {name: (DTYPES[entry.dtype], entry.shape) for name, entry in self.manifest.tensors.items()}
        return Tensors(kinds, self.tensor, self.part)

    def _reader(self, file: int) -> ShardReader:
        if file not in self._readers:
            entry = self.manifest.files[file]
            self._readers[file] = ShardReader(self._store, self._folder, entry, self.manifest.algorithm)
        return self._readers[file]


@dataclass(frozen=True)
class Content:
    """What a step holds, apart from how it is laid out."""

    step: int
    tensors: Tensors
    values: Mapping[str, Any]
    metadata: Mapping[str, Any]
    rank_values: Mapping[int, Any]


def read_content(store: Store, step: StepFolder) -> Content:
    """All of a step; its tensors are read when they are asked for."""
    source = OpenStep(store, step)
    manifest = source.manifest
    return Content(manifest.step, source.tensors(), manifest.values, manifest.metadata, manifest.rank_values)


def write_content(
    store: Store,
    content: Content,
    shards: int = 1,
    with_parity: bool = False,
    algorithm: Algorithm | None = None,
) -> StepFolder:
    """Commit `content` as a new step in `shards` data files, each with its rows of every tensor.

    One piece of one tensor is in memory at a time. Each is read twice: hashes come before the data in a file.
    """
    sequence = 1 + max((step.marker.sequence for step in commit.committed_steps(store)), default=0)
    folder = commit.free_folder(store, content.step)
    attempt = Attempt(content.step, sequence, folder, secrets.token_hex(4), shards, algorithm or best_algorithm())
    holds = {name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in content.tensors.kinds.items()}

    def read(spec: PieceSpec) -> memoryview:
        return bytes_of(content.tensors.part(spec.tensor, spec.box).contiguous())

    for shard in range(shards):
        boxes = {name: _rows(shape, shard, shards) for name, (_, shape) in holds.items()}
        specs, _ = lay_out([(name, *holds[name], box) for name, box in boxes.items() if box is not None and box.count])
        extra = {"holds": holds, "rank_values": content.rank_values.get(shard, {})}
        commit.stream_part(store, attempt, shard, specs, read, extra)
    parts = commit.await_parts(store, attempt, lambda: False, 1.0)
    manifest = commit.compose(attempt, parts, content.values, content.metadata)
    if with_parity:
        manifest = parity.add(store, folder, attempt.token, manifest)
    return commit.publish(store, attempt, manifest)


def _rows(shape: tuple[int, ...], shard: int, shards: int) -> Box | None:
    """One shard's rows of a tensor; a scalar belongs to the first."""
    if not shape:
        return Box((), ()) if shard == 0 else None
    first, last = shape[0] * shard // shards, shape[0] * (shard + 1) // shards
    return Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
