"""Where the pieces of a step are in memory, and how a process of any layout gets those that it needs.

Every process announces the complete snapshots in its buffers: what the process before it saved there, and copies for
another node. Processes of one node read each other's buffers. What only other nodes hold is requested from them.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from keepstep.checkpoint.in_memory.footer import read_description, read_footer
from keepstep.checkpoint.in_memory.transfer import Request, exchange
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import DTYPES, RANK_KEY
from keepstep.checkpoint.protocol.shards import PieceSpec
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice


@dataclass(frozen=True)
class HeldSnapshot:
    """One process's part of a step, in a buffer that the process `holder` announced."""

    step: int
    attempt: int
    """When the processes that saved it started: parts of one step from two attempts do not belong together."""
    rank: int
    world_size: int
    fingerprint: str
    """Identifies rank, number of processes and pieces."""
    holder: int
    place: Path


Source = tuple[HeldSnapshot, PieceSpec]
"""A piece in one buffer."""


@dataclass(frozen=True)
class StepSources:
    """A step that every process can load."""

    snapshots: Sequence[HeldSnapshot]
    """In the order of the ranks that saved them."""
    pieces: Mapping[str, Mapping[TensorSlice, Sequence[Source]]]
    """By tensor and slice: the buffers that hold it. Other processes may know of other pieces."""

    @property
    def complete(self) -> bool:
        """Whether the part of every process that saved the step is left, with its random generators."""
        return len({snapshot.rank for snapshot in self.snapshots}) == self.snapshots[0].world_size

    def parts_of(self, wanted: PieceSpec) -> list[tuple[TensorSlice, Sequence[Source]]]:
        """The parts that our slice of a tensor consists of."""
        if not wanted.tensor_slice.count:
            return []
        held = self.pieces.get(wanted.tensor, {}).items()
        parts = [(wanted.tensor_slice.intersection(each), sources) for each, sources in held]
        return [(common, sources) for common, sources in parts if common is not None]

    def covers(self, wanted: PieceSpec) -> bool:
        """Whether the pieces cover our slice of a tensor of the same dtype and shape."""
        sources = next(iter(self.pieces.get(wanted.tensor, {}).values()), ())
        same = [(spec.dtype, spec.tensor_shape) == (wanted.dtype, wanted.tensor_shape) for _, spec in sources[:1]]
        # The slices of one layout are equal or do not overlap.
        covered = sum(common.count for common, _ in self.parts_of(wanted))
        return same == [True] and covered == wanted.tensor_slice.count


def held_in(places: Iterable[Path], holder: int) -> list[HeldSnapshot]:
    """The complete snapshots in some buffers, of any layout."""
    held = []
    for place in places:
        with place.open("rb") as file:
            footer = read_footer(file.fileno())
        if footer is not None:
            facts = {name: footer[name] for name in ("step", "attempt", "rank", "world_size", "fingerprint")}
            held.append(HeldSnapshot(**facts, holder=holder, place=place))
    return held


class SnapshotFinder:
    """Finds and reads steps for a process that needs the pieces `specs`. All methods are collective."""

    def __init__(
        self, processes: ProcessGroupInfo, ranks_per_node: int, specs: Sequence[PieceSpec], fingerprint: str
    ) -> None:
        self._processes, self._specs, self._fingerprint = processes, specs, fingerprint
        self._ranks_per_node = ranks_per_node or processes.world_size

    def newest(self, places: Iterable[Path], before: int | None) -> StepSources | None:
        """The newest step (`before` a given step) of which the buffers of all processes cover every tensor."""
        announced = self._processes.gather((self._fingerprint, held_in(places, self._processes.rank)))
        layout = {fingerprint for fingerprint, _ in announced}
        steps: dict[tuple[int, int], list[HeldSnapshot]] = defaultdict(list)
        for snapshot in sorted((each for _, held in announced for each in held), key=lambda each: each.rank):
            if before is None or snapshot.step < before:
                steps[snapshot.step, snapshot.attempt].append(snapshot)
        newest_first = sorted(steps, reverse=True)
        found = next(filter(None, (self._open(steps[key], layout) for key in newest_first)), None)
        if found is None or found.complete or found.snapshots[0].world_size != self._processes.world_size:
            return found
        # The same number of processes gives equal bits only with the random generators of all: rather repeat a step.
        attempt = found.snapshots[0].attempt
        older = (self._open(steps[key], layout) for key in newest_first if key[1] == attempt)
        return next((each for each in older if each is not None and each.complete), found)

    def _open(self, snapshots: Sequence[HeldSnapshot], layout: set[str]) -> StepSources | None:
        """The sources of a step; None where they do not cover what the processes need."""
        if layout <= {snapshot.fingerprint for snapshot in snapshots}:
            # Saved in our own layout: everyone knows its pieces.
            own = [snapshot for snapshot in snapshots if snapshot.fingerprint == self._fingerprint]
            in_layout = {spec.tensor: {spec.tensor_slice: [(each, spec) for each in own]} for spec in self._specs}
            return StepSources(snapshots, in_layout)
        pieces: dict[str, dict[TensorSlice, list[Source]]] = defaultdict(lambda: defaultdict(list))
        described = self._described(snapshots)
        for snapshot in snapshots:
            for spec in described[snapshot.rank]:
                pieces[spec.tensor][spec.tensor_slice].append((snapshot, spec))
        sources = StepSources(snapshots, pieces)
        wanted = [spec for spec in self._specs if not _is_of_one_rank(spec.tensor)]
        unread = {name for name in pieces if not _is_of_one_rank(name)} - {spec.tensor for spec in wanted}
        answers = self._processes.gather((all(map(sources.covers, wanted)), unread))
        # A tensor that nobody needs is a sign of another model or optimizer.
        fits = all(covered for covered, _ in answers) and not set.intersection(*(names for _, names in answers))
        return sources if fits else None

    def _described(self, snapshots: Sequence[HeldSnapshot]) -> dict[int, list[PieceSpec]]:
        """The pieces in each of the snapshots, by the rank that saved it."""
        one_of_each = {snapshot.rank: snapshot for snapshot in snapshots}.values()
        mine = {
            snapshot.rank: zlib.compress(json.dumps(_read_pieces(snapshot.place)).encode())
            for snapshot in one_of_each
            if snapshot.holder == self._processes.rank
        }
        return {
            rank: [PieceSpec.from_json(raw) for raw in json.loads(zlib.decompress(packed))]
            for described in self._processes.gather(mine)
            for rank, packed in described.items()
        }

    def load(self, sources: StepSources, tensors: Sequence[torch.Tensor]) -> None:
        """Fill this process's part of each tensor, in the order of `specs`.

        The random generators of a process that did not exist before stay as they are.
        """
        near: list[tuple[torch.Tensor, Request]] = []
        far: dict[int, list[tuple[torch.Tensor, Request]]] = defaultdict(list)
        for wanted, tensor in zip(self._specs, tensors, strict=True):
            for common, held in sources.parts_of(wanted) if sources.covers(wanted) else ():
                snapshot, spec = self._nearest(held)
                is_near = self._node(snapshot.holder) == self._node(self._processes.rank)
                part = tensor[common.within(wanted.tensor_slice)], Request(str(snapshot.place), spec, common)
                (near if is_near else far[snapshot.holder]).append(part)
        opened = cache(_open_memory)
        with torch.no_grad():
            for target, request in near:
                target.copy_(_cut(opened, request))
            exchange(self._processes, far, lambda request: _cut(opened, request))
        # Nobody overwrites a buffer that another process still reads.
        self._processes.gather(None)

    def _nearest(self, sources: Sequence[Source]) -> Source:
        """A buffer on this node if there is one; processes share the work among those that hold the same."""
        node = self._node(self._processes.rank)
        near = [source for source in sources if self._node(source[0].holder) == node]
        choice = near or sources
        return choice[self._processes.rank % len(choice)]

    def _node(self, rank: int) -> int:
        return rank // self._ranks_per_node


def _is_of_one_rank(name: str) -> bool:
    return name.startswith(f"{RANK_KEY}.")


def _read_pieces(place: Path) -> list[list[object]]:
    with place.open("rb") as file:
        description = read_description(file.fileno())
    assert description is not None
    _, _, pieces = description["layout"]
    return list(pieces)


def _open_memory(place: str) -> torch.Tensor:
    """The bytes of a buffer; they stay open as long as a tensor refers to them."""
    fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
    finally:
        os.close(fd)


def _cut(opened: Callable[[str], torch.Tensor], request: Request) -> torch.Tensor:
    """The requested part of a piece, as a view of the buffer."""
    spec = request.spec
    piece = opened(request.place)[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
    return piece.view(spec.tensor_slice.shape)[request.part.within(spec.tensor_slice)]
