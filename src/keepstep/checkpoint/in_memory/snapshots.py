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

from keepstep.checkpoint.async_save.staging import StagingBuffer
from keepstep.checkpoint.in_memory.footer import FOOTER_BYTES, clear_footer, make_footer, read_footer, write_footer
from keepstep.checkpoint.in_memory.mirror import Mirror
from keepstep.checkpoint.in_memory.whole import load_whole, local_tensors, whole_fingerprint
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import DTYPES, local_shard, split_state
from keepstep.checkpoint.protocol.shards import PieceSpec, lay_out


def newest_snapshot(places: Sequence[Path]) -> int:
    """The newest step of which one of the buffers holds a complete snapshot, of any layout; -1 where none does."""
    newest = -1
    for place in places:
        with place.open("rb") as file:
            footer = read_footer(file.fileno())
            newest = max(newest, int(footer["step"]) if footer is not None else -1)
    return newest


@dataclass(frozen=True)
class _Held:
    """The steps that one process has in memory."""

    fingerprint: str
    own: set[int]
    mirrored: dict[int, str]
    """Steps it holds for another process, with that process's fingerprint."""
    tensors: str
    """Identifies its tensors, if it holds whole ones."""
    whole: set[int]
    """Steps of these tensors, saved with any number of processes."""


class InMemorySnapshots:
    """Saves this process's part of the newest steps into `places`, and finds it there again.

    `newest` and `load` are collective. A snapshot can be loaded into the layout that saved it, and one of whole tensors
    into any number of processes; checkpoints are for everything else. With several nodes of `ranks_per_node` processes
    each, `mirror_places` hold a copy of another node's snapshots. `metadata` is what a checkpoint of this run would
    carry, for a rescue.
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
        self._fingerprint = self._whole_fingerprint = ""
        self._next = 0

    def newest(self, state: Mapping[str, Any], before: int | None = None) -> int | None:
        """The newest step (`before` a given step) that every process can get for a state of this layout, or None."""
        self._plan(state)
        self.join()
        mirrored = self._mirror.steps() if self._mirror is not None else {}
        own, whole = ({*self._steps(key)} for key in ("fingerprint", "whole"))
        self._held = self._processes.gather(_Held(self._fingerprint, own, mirrored, self._whole_fingerprint, whole))
        known = set().union(*(held.own | held.whole for held in self._held))
        wanted = (step for step in sorted(known, reverse=True) if before is None or step < before)
        return next((step for step in wanted if self._in_layout(step) or self._whole_source(step) is not None), None)

    def _steps(self, key: str) -> dict[int, StagingBuffer]:
        """The complete snapshots of our layout (`fingerprint`), or of the same tensors (`whole`), by step."""
        ours = {"fingerprint": self._fingerprint, "whole": self._whole_fingerprint}[key]
        footers = [(read_footer(buffer.fd), buffer) for buffer in self._buffers]
        return {int(footer["step"]): buffer for footer, buffer in footers if footer and ours and footer[key] == ours}

    def _in_layout(self, step: int) -> bool:
        """Whether every process has this step in our layout, or can get it."""
        return all(self._obtainable(rank, step) for rank in range(self._processes.world_size))

    def _whole_source(self, step: int) -> int | None:
        """The process that sends the whole tensors of a step to the others."""
        # Stages of a pipeline have different ones.
        if len({held.tensors for held in self._held}) > 1:
            return None
        return next((rank for rank, held in enumerate(self._held) if step in held.whole), None)

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
        layout = {"fingerprint": self._fingerprint, "whole": self._whole_fingerprint}
        facts = {**layout, "step": step, "values": values, "metadata": metadata or {}}
        footer = make_footer({**facts, "description": [self._size_bytes, len(self._description)]})
        pieces = list(zip(self._specs, local_tensors(state).values(), strict=True))
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
        if not self._in_layout(step):
            source = self._whole_source(step)
            assert source is not None
            own = self._steps("whole").get(step)
            self._keep(own)
            return load_whole(self._processes, source, own.fd if own is not None else None, into)
        self._fetch_missing(step)
        buffer = self._steps("fingerprint")[step]
        footer = read_footer(buffer.fd)
        assert footer is not None
        with mmap.mmap(buffer.fd, 0) as memory:
            everything = torch.frombuffer(memory, dtype=torch.uint8)
            for spec, tensor in zip(self._specs, local_tensors(into).values(), strict=True):
                piece = everything[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
                with torch.no_grad():
                    tensor.copy_(piece.view(spec.tensor_slice.shape))
            del everything, piece
        self._keep(buffer)
        values: dict[str, Any] = footer["values"]
        return values

    def _keep(self, buffer: StagingBuffer | None) -> None:
        """The step just loaded is the newest complete one: the next copy must not overwrite it."""
        if buffer is not None:
            self._next = (self._buffers.index(buffer) + 1) % len(self._buffers)

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
        self._whole_fingerprint = whole_fingerprint(self._specs)
        self._description = json.dumps({"layout": layout, "metadata": self._metadata}).encode()
