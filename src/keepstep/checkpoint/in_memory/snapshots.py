"""Snapshots of the newest steps in memory that outlives the process: a run resumes from them after a crash.

Two buffers are used in turn, so that a process killed in the middle of a copy still leaves the step before. A buffer
holds the process's pieces back to back, a description of them, and a footer that is written last (see footer.py). The
memory belongs to the agent; rescue.py writes a checkpoint from it without the processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint.async_save.staging import StagingBuffer
from keepstep.checkpoint.in_memory.footer import FOOTER_BYTES, clear_footer, make_footer, read_footer, write_footer
from keepstep.checkpoint.in_memory.sources import SnapshotFinder, StepSources, held_in
from keepstep.checkpoint.in_memory.transfer import Mirror
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import local_shard, local_tensors, split_state
from keepstep.checkpoint.protocol.shards import PieceSpec, lay_out


def newest_snapshot(places: Sequence[Path]) -> int:
    """The newest step of which one of the buffers holds a complete snapshot, of any layout; -1 where none does."""
    return max((snapshot.step for snapshot in held_in(places, 0)), default=-1)


@dataclass(frozen=True)
class _Plan:
    """This process's part of every step, and how it is written and found."""

    specs: Sequence[PieceSpec]
    size_bytes: int
    fingerprint: str
    description: bytes
    finder: SnapshotFinder


class InMemorySnapshots:
    """Saves this process's part of the newest steps into `places`, and finds steps there again.

    `newest` and `load` are collective. Any number of processes can load a step, in any layout, as long as the memory of
    all nodes covers every tensor. With several nodes of `ranks_per_node` processes each, `mirror_places` get a copy of
    another node's snapshots; what they hold from before counts always. `metadata` is what a checkpoint of this run
    would carry, for a rescue.
    """

    def __init__(
        self,
        places: Sequence[Path],
        mirror_places: Sequence[Path] = (),
        ranks_per_node: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._processes = ProcessGroupInfo()
        self._attempt: int = self._processes.broadcast(time.time_ns())
        self._places, self._mirror_places, self._ranks_per_node = places, mirror_places, ranks_per_node
        several_nodes = ranks_per_node and self._processes.world_size > ranks_per_node
        self._mirror = Mirror(mirror_places, ranks_per_node) if several_nodes and mirror_places else None
        self._metadata = dict(metadata or {})
        self._buffers = [StagingBuffer(os.open(place, os.O_RDWR | os.O_CLOEXEC)) for place in places]
        self._plan: _Plan | None = None
        self._found: dict[int, StepSources] = {}
        self._next = self._saved = 0

    def newest(self, state: Mapping[str, Any], before: int | None = None) -> int | None:
        """The newest step (`before` a given step) that can be loaded into a state of this layout, or None."""
        self.join()
        found = self._planned(state).finder.newest([*self._places, *self._mirror_places], before)
        if found is None:
            return None
        step = found.snapshots[0].step
        self._found[step] = found
        return step

    def save(
        self, step: int, state: Mapping[str, Any], values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Start to copy; the tensors must not change before `before_update` has returned.

        `metadata` of this step is added to that of the run.
        """
        self.join()
        if self._mirror is None and self._saved == len(self._buffers):
            # A node that was left alone has newer steps by now than the copies of the lost one.
            for place in self._mirror_places:
                os.truncate(place, 0)
        self._saved += 1
        plan = self._planned(state)
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        footer = make_footer(
            {
                "step": step,
                "attempt": self._attempt,
                "rank": self._processes.rank,
                "world_size": self._processes.world_size,
                "fingerprint": plan.fingerprint,
                "values": values,
                "metadata": metadata or {},
                "description": [plan.size_bytes, len(plan.description)],
            }
        )
        pieces = list(zip(plan.specs, local_tensors(state), strict=True))
        total_bytes = plan.size_bytes + len(plan.description) + FOOTER_BYTES
        clear_footer(buffer.fd)
        buffer.ensure(total_bytes, any(tensor.is_cuda for _, tensor in pieces))
        os.pwrite(buffer.fd, plan.description, plan.size_bytes)

        def copied(error: Exception | None) -> None:
            if error is None:
                write_footer(buffer.fd, footer)
                if self._mirror is not None:
                    self._mirror.exchange(buffer.fd)

        buffer.start(pieces, total_bytes, copied)

    def before_update(self) -> None:
        """Call before anything changes the tensors of the last `save`."""
        for buffer in self._buffers:
            buffer.before_update()

    def join(self) -> None:
        """Wait until no copy is under way."""
        for buffer in self._buffers:
            buffer.join()
        if self._mirror is not None:
            self._mirror.join()

    def load(self, step: int, into: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `into` in place with a step that `newest` has found; returns its plain values."""
        sources = self._found[step]
        self._planned(into).finder.load(sources, local_tensors(into))
        # The step just loaded is the newest complete one, and stays until the next one is complete.
        needed = {snapshot.place for snapshot in sources.snapshots if snapshot.holder == self._processes.rank}
        self._next = _first_other(self._places, needed)
        if self._mirror is not None:
            self._mirror.next = _first_other(self._mirror_places, needed)
        first = sources.snapshots[0]
        mine = _values_in(first.place) if first.holder == self._processes.rank else None
        values: dict[str, Any] = self._processes.broadcast(mine, first.holder)
        return values

    def close(self) -> None:
        """Release the memory; the snapshots stay as long as the agent that owns it."""
        if self._mirror is not None:
            self._mirror.close()
        for buffer in self._buffers:
            buffer.close()

    def _planned(self, state: Mapping[str, Any]) -> _Plan:
        """Our pieces, which are the same for every step."""
        if self._plan is None:
            rank, world_size = self._processes.rank, self._processes.world_size
            tensors, _ = split_state(state)
            shards = [local_shard(name, tensor, rank, world_size) for name, tensor in tensors.items()]
            laid_out, size_bytes = lay_out([shard.layout for shard in shards])
            by_piece = {(spec.tensor, spec.tensor_slice): spec for spec in laid_out}
            specs = [by_piece[shard.name, shard.tensor_slice] for shard in shards]
            layout = [rank, world_size, [spec.to_json() for spec in specs]]
            fingerprint = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
            description = json.dumps({"layout": layout, "metadata": self._metadata}).encode()
            finder = SnapshotFinder(self._processes, self._ranks_per_node, specs, fingerprint)
            self._plan = _Plan(specs, size_bytes, fingerprint, description, finder)
        return self._plan


def _first_other(places: Sequence[Path], needed: Set[Path]) -> int:
    return next((number for number, place in enumerate(places) if place not in needed), 0)


def _values_in(place: Path) -> Any:
    with place.open("rb") as file:
        footer = read_footer(file.fileno())
    assert footer is not None
    return footer["values"]
