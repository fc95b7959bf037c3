"""Snapshots of the newest steps in memory that outlives the process: a run resumes from them after a crash.

Two buffers are used in turn, so that a process killed in the middle of a copy still leaves the step before. A buffer
holds the process's pieces back to back, a description of them, and a footer that is written last (see footer.py). The
memory belongs to the agent; rescue.py writes a checkpoint from it without the processes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.async_save.staging import StagingBuffer
from keepstep.checkpoint.in_memory.footer import FOOTER_BYTES, clear_footer, make_footer, read_footer, write_footer
from keepstep.checkpoint.in_memory.mirror import Mirror
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import DTYPES, local_shard, split_state
from keepstep.checkpoint.protocol.shards import PieceSpec, lay_out


def has_snapshot(places: Sequence[Path]) -> bool:
    """Whether one of the buffers holds a complete snapshot, of any layout."""
    for place in places:
        with place.open("rb") as file:
            if read_footer(file.fileno()) is not None:
                return True
    return False


@dataclass(frozen=True)
class _Held:
    """The steps that one process has in memory."""

    fingerprint: str
    own: set[int]
    mirrored: dict[int, str]
    """Steps it holds for another process, with that process's fingerprint."""


class InMemorySnapshots:
    """Saves this process's part of the newest steps into `places`, and finds it there again.

    `newest` and `load` are collective. A snapshot can only be loaded into the layout that saved it; checkpoints are for
    everything else. With several nodes of `ranks_per_node` processes each, `mirror_places` hold a copy of another
    node's snapshots. `metadata` is what a checkpoint of this run would carry, for a rescue.
    """

    def __init__(
        self,
        places: Sequence[Path],
        mirror_places: Sequence[Path] = (),
        ranks_per_node: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._processes = ProcessGroupInfo()
        several_nodes = ranks_per_node and self._processes.world_size > ranks_per_node
        self._mirror = Mirror(mirror_places, ranks_per_node) if several_nodes and mirror_places else None
        self._metadata = dict(metadata or {})
        self._held: list[_Held] = []
        self._buffers = [StagingBuffer(os.open(place, os.O_RDWR | os.O_CLOEXEC)) for place in places]
        self._specs: list[PieceSpec] | None = None
        self._size_bytes = 0
        self._description = b""
        self._fingerprint = ""
        self._next = 0

    def newest(self, state: Mapping[str, Any], before: int | None = None) -> int | None:
        """The newest step (`before` a given step) that every process has for a state of this layout, or None."""
        self._plan(state)
        self.join()
        own = {step for buffer in self._buffers if (step := self._step_in(buffer)) is not None}
        mirrored = self._mirror.steps() if self._mirror is not None else {}
        self._held = self._processes.gather(_Held(self._fingerprint, own, mirrored))
        known = set().union(*(held.own for held in self._held))
        wanted = (step for step in sorted(known, reverse=True) if before is None or step < before)
        ranks = range(self._processes.world_size)
        return next((step for step in wanted if all(self._obtainable(rank, step) for rank in ranks)), None)

    def _step_in(self, buffer: StagingBuffer) -> int | None:
        """The step of the complete snapshot in a buffer, if it has our layout."""
        footer = read_footer(buffer.fd)
        return int(footer["step"]) if footer is not None and footer["fingerprint"] == self._fingerprint else None

    def _obtainable(self, rank: int, step: int) -> bool:
        """Whether a process has this step, or can get it from the process that mirrors it."""
        held = self._held[rank]
        if step in held.own or self._mirror is None:
            return step in held.own
        return self._held[self._mirror.holder(rank)].mirrored.get(step) == held.fingerprint

    def save(
        self, step: int, state: Mapping[str, Any], values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Start to copy; the tensors must not change before `before_update` has returned.

        `metadata` of this step is added to that of the run.
        """
        self._plan(state)
        assert self._specs is not None
        self.join()
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        facts = {"fingerprint": self._fingerprint, "step": step, "values": values, "metadata": metadata or {}}
        footer = make_footer({**facts, "description": [self._size_bytes, len(self._description)]})
        pieces = list(zip(self._specs, _local_tensors(state), strict=True))
        total_bytes = self._size_bytes + len(self._description) + FOOTER_BYTES
        clear_footer(buffer.fd)
        buffer.ensure(total_bytes, any(tensor.is_cuda for _, tensor in pieces))
        os.pwrite(buffer.fd, self._description, self._size_bytes)

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
        """Fill the tensors of `into` in place and return the values that were saved with them."""
        assert self._specs is not None
        self._fetch_missing(step)
        buffer = next(buffer for buffer in self._buffers if self._step_in(buffer) == step)
        footer = read_footer(buffer.fd)
        assert footer is not None
        with mmap.mmap(buffer.fd, 0) as memory:
            everything = torch.frombuffer(memory, dtype=torch.uint8)
            for spec, tensor in zip(self._specs, _local_tensors(into), strict=True):
                piece = everything[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
                with torch.no_grad():
                    tensor.copy_(piece.view(spec.tensor_slice.shape))
            del everything, piece
        # The step just loaded is the newest complete one: the next copy must not overwrite it.
        self._next = (self._buffers.index(buffer) + 1) % len(self._buffers)
        values: dict[str, Any] = footer["values"]
        return values

    def _fetch_missing(self, step: int) -> None:
        """Processes of a replaced node get their state from the nodes that mirror it."""
        for rank in range(self._processes.world_size):
            if step not in self._held[rank].own:
                assert self._mirror is not None
                if self._processes.rank in (rank, self._mirror.holder(rank)):
                    self._mirror.give_back(rank, step, self._buffers[0].fd)

    def close(self) -> None:
        """Release the memory; the snapshots stay as long as the agent that owns it."""
        if self._mirror is not None:
            self._mirror.close()
        for buffer in self._buffers:
            buffer.close()

    def _plan(self, state: Mapping[str, Any]) -> None:
        if self._specs is not None:
            return
        rank, world_size = self._processes.rank, self._processes.world_size
        tensors, _ = split_state(state)
        shards = [local_shard(name, tensor, rank, world_size) for name, tensor in tensors.items()]
        specs, self._size_bytes = lay_out([shard.layout for shard in shards])
        by_piece = {(spec.tensor, spec.tensor_slice): spec for spec in specs}
        self._specs = [by_piece[shard.name, shard.tensor_slice] for shard in shards]
        layout = [rank, world_size, [spec.to_json() for spec in self._specs]]
        self._fingerprint = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
        self._description = json.dumps({"layout": layout, "metadata": self._metadata}).encode()


def _local_tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors, _ = split_state(state)
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
