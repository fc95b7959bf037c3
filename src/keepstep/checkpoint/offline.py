"""Read, write and compare steps without a training job, as whole tensors. Used by tools and conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from keepstep.checkpoint.protocol import commit, parity, retention
from keepstep.checkpoint.protocol.layout import DTYPE_NAMES, DTYPES, LocalShard
from keepstep.checkpoint.protocol.manifest import BEST_ALGORITHM, Algorithm, CommittedCheckpoint, Manifest
from keepstep.checkpoint.protocol.restore import bytes_of, fill
from keepstep.checkpoint.protocol.shards import PieceSpec, ShardReader, lay_out
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice, whole
from keepstep.checkpoint.storage.store import Store

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class Tensors(Mapping[str, torch.Tensor]):
    """Lazy tensors by name: each access reads the tensor again; dtypes and shapes are known without reading."""

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        read: Callable[[str], torch.Tensor],
        read_slice: Callable[[str, TensorSlice], torch.Tensor] | None = None,
    ) -> None:
        self.kinds = kinds
        self._read = read
        self._read_box = read_slice

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.kinds:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        # The default of a Mapping would read the tensor.
        return name in self.kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def part(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """One slice of a tensor; the rest is not read where the source supports that."""
        if self._read_box is not None:
            return self._read_box(name, tensor_slice)
        tensor = self[name]
        return tensor[tensor_slice.within(whole(tensor.shape))] if tensor.shape else tensor


class StepReader:
    """Reads single tensors of a committed step."""

    def __init__(self, store: Store, step: CommittedCheckpoint) -> None:
        self.manifest: Manifest = commit.read_manifest(store, step)
        self._store = store
        self._folder = step.name
        self._readers: dict[int, ShardReader] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """One complete tensor, with its hashes checked."""
        return self.part(name, whole(self.manifest.tensors[name].shape))

    def part(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """One slice of a tensor, with its hashes checked."""
        entry = self.manifest.tensors[name]
        target = torch.empty(tensor_slice.shape, dtype=DTYPES[entry.dtype])
        shard = LocalShard(name, entry.dtype, entry.shape, tensor_slice, target, None)
        for piece in entry.pieces:
            common = piece.tensor_slice.intersection(tensor_slice)
            if common is not None:
                fill(self._reader(piece.file), shard, piece, common)
        return target

    def tensors(self) -> Tensors:
        """All tensors of the step, read on demand."""
        kinds = {name: (DTYPES[entry.dtype], entry.shape) for name, entry in self.manifest.tensors.items()}
        return Tensors(kinds, self.tensor, self.part)

    def _reader(self, file: int) -> ShardReader:
        if file not in self._readers:
            entry = self.manifest.files[file]
            self._readers[file] = ShardReader(self._store, self._folder, entry, self.manifest.algorithm)
        return self._readers[file]


@dataclass(frozen=True)
class Content:
    """What a step contains, independent of its file layout."""

    step: int
    tensors: Tensors
    values: Mapping[str, Any]
    metadata: Mapping[str, Any]
    rank_values: Mapping[int, Any]


def read_content(store: Store, step: CommittedCheckpoint) -> Content:
    """The content of a step; tensors are read on demand."""
    source = StepReader(store, step)
    manifest = source.manifest
    return Content(manifest.step, source.tensors(), manifest.values, manifest.metadata, manifest.rank_values)


def write_content(
    store: Store,
    content: Content,
    shards: int = 1,
    with_parity: bool = False,
    algorithm: Algorithm = BEST_ALGORITHM,
) -> CommittedCheckpoint:
    """Commit `content` as a new step in `shards` data files; each file has a share of the rows of every tensor.

    One piece of one tensor is in memory at a time. Each piece is read twice, because hashes precede the data.
    """
    attempt = commit.new_attempt(store, content.step, shards, commit.newest_sequence(store) + 1, algorithm)
    if not retention.being_written(store, attempt.folder):
        # What a killed command left here is replaced: it has no marker, and nobody writes it any more.
        commit.remove_uncommitted(store, attempt.folder)
    holds = {name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in content.tensors.kinds.items()}

    def read(spec: PieceSpec) -> memoryview:
        return bytes_of(content.tensors.part(spec.tensor, spec.tensor_slice).contiguous())

    with retention.writing(store, attempt.folder):
        for shard in range(shards):
            rows = {name: _rows(shape, shard, shards) for name, (_, shape) in holds.items()}
            specs, _ = lay_out(
                [(name, *holds[name], part) for name, part in rows.items() if part is not None and part.count]
            )
            extra = {"holds": holds, "rank_values": content.rank_values.get(shard, {})}
            commit.write_part(store, attempt, shard, specs, read, extra)
        parts = commit.await_parts(store, attempt, lambda: False, 1.0)
        manifest = commit.compose(attempt, parts, content.values, content.metadata)
        if with_parity:
            manifest = parity.add(store, attempt.folder, attempt.token, manifest)
        return commit.publish(store, attempt, manifest)


def _rows(shape: tuple[int, ...], shard: int, shards: int) -> TensorSlice | None:
    """The rows of a tensor that belong to one shard; a scalar belongs to the first shard."""
    if not shape:
        return TensorSlice((), ()) if shard == 0 else None
    first, last = shape[0] * shard // shards, shape[0] * (shard + 1) // shards
    return TensorSlice((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))


@dataclass(frozen=True)
class Difference:
    """One tensor that differs between two steps."""

    name: str
    kind: Literal["only_in_first", "only_in_second", "shape", "dtype", "values"]
    detail: str
    differing: int = 0
    """Elements that differ."""
    largest: float = 0.0
    """Largest absolute difference."""


def differences(first: StepReader, second: StepReader) -> tuple[list[Difference], int]:
    """All differences, sorted by name, and the number of tensors compared. Loads one tensor of each step at a time."""
    found: list[Difference] = []
    ours, theirs = first.manifest.tensors, second.manifest.tensors
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            found.append(Difference(name, "only_in_first", f"{ours[name].dtype} {list(ours[name].shape)}"))
        elif name not in ours:
            found.append(Difference(name, "only_in_second", f"{theirs[name].dtype} {list(theirs[name].shape)}"))
        elif ours[name].shape != theirs[name].shape:
            found.append(Difference(name, "shape", f"{list(ours[name].shape)} and {list(theirs[name].shape)}"))
        elif ours[name].dtype != theirs[name].dtype:
            found.append(Difference(name, "dtype", f"{ours[name].dtype} and {theirs[name].dtype}"))
        else:
            difference = _values(name, first.tensor(name), second.tensor(name))
            if difference is not None:
                found.append(difference)
    return found, len({*ours} & {*theirs})


def _values(name: str, left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    # Compare bytes, not values: NaN equals NaN, and 0.0 differs from -0.0.
    same = (left.reshape(-1, 1).view(torch.uint8) == right.reshape(-1, 1).view(torch.uint8)).all(dim=1)
    differing = int((~same).sum())
    if not differing:
        return None
    largest = float((left.reshape(-1).double() - right.reshape(-1).double())[~same].abs().max())
    detail = f"{differing} of {left.numel()} elements, largest difference {largest:.3g}"
    return Difference(name, "values", detail, differing, largest)
