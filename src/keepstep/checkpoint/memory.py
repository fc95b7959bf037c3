"""The newest steps in memory that outlives the process: after a crash a run goes on from the step before it.

Two buffers take turns, so that a process killed in the middle of a copy still leaves the step before. A buffer is the
process's pieces back to back, then a page that says what they are, marked whole as the last act of the copy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.layout import DTYPES, holding, split_state
from keepstep.checkpoint.mirror import Mirror
from keepstep.checkpoint.page import PAGE_BYTES, forget, make_page, read_page, write_page
from keepstep.checkpoint.shards import PieceSpec, lay_out
from keepstep.checkpoint.snapshot import Snapshot
from keepstep.checkpoint.together import Together


def holds_step(places: Sequence[Path]) -> bool:
    """Whether some step lies whole in one of the places, for whatever layout."""
    for place in places:
        with place.open("rb") as file:
            if read_page(file.fileno()) is not None:
                return True
    return False


@dataclass(frozen=True)
class _Kept:
    """What one process has in memory."""

    fingerprint: str
    own: set[int]
    mirrored: dict[int, str]
    """Steps it keeps for another process, with that one's fingerprint."""


class StepMemory:
    """Keeps this process's part of the newest steps in `places` and finds it there again.

    `newest` and `load` are collective. The layout must be the one that was kept: for any other there are checkpoints.
    With several nodes, of `neighbours` processes each, `mirror_places` keep a copy of another node's steps.
    """

    def __init__(self, places: Sequence[Path], mirror_places: Sequence[Path] = (), neighbours: int = 0) -> None:
        self._together = Together()
        several = neighbours and self._together.world_size > neighbours
        self._mirror = Mirror(mirror_places, neighbours) if several and mirror_places else None
        self._holdings: list[_Kept] = []
        self._buffers = [_Buffer(place) for place in places]
        self._specs: list[PieceSpec] | None = None
        self._size_bytes = 0
        self._fingerprint = ""
        self._turn = 0

    def newest(self, state: Mapping[str, Any], before: int | None = None) -> int | None:
        """The newest step (`before` some step) that every process has whole for a state of this layout, or None."""
        self._plan(state)
        self.join()
        own = {step for buffer in self._buffers if (step := buffer.step(self._fingerprint)) is not None}
        mirrored = self._mirror.steps() if self._mirror is not None else {}
        self._holdings = self._together.gather(_Kept(self._fingerprint, own, mirrored))
        known = set().union(*(kept.own for kept in self._holdings))
        wanted = (step for step in sorted(known, reverse=True) if before is None or step < before)
        return next((step for step in wanted if all(self._can_have(rank, step) for rank in self._ranks())), None)

    def _ranks(self) -> range:
        return range(self._together.world_size)

    def _can_have(self, rank: int, step: int) -> bool:
        """Whether a process has this step, or gets it back from the one that keeps its copy."""
        kept = self._holdings[rank]
        if step in kept.own or self._mirror is None:
            return step in kept.own
        return self._holdings[self._mirror.holder(rank)].mirrored.get(step) == kept.fingerprint

    def keep(self, step: int, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Begin to copy; the tensors must not change before `before_update` has returned."""
        self._plan(state)
        assert self._specs is not None
        self.join()
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        page = make_page({"fingerprint": self._fingerprint, "step": step, "values": values})
        pieces = list(zip(self._specs, _local_tensors(state), strict=True))
        mirror = self._mirror
        whole = (lambda: None) if mirror is None else (lambda: mirror.exchange(buffer.snapshot.handle))
        buffer.fill(pieces, self._size_bytes, page, whole)

    def before_update(self) -> None:
        """Call before anything changes the kept tensors."""
        for buffer in self._buffers:
            buffer.snapshot.before_update()

    def join(self) -> None:
        """Return when no copy is under way."""
        for buffer in self._buffers:
            buffer.snapshot.join()
        if self._mirror is not None:
            self._mirror.join()

    def load(self, step: int, into: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `into` in place and return the values that were kept with them."""
        assert self._specs is not None
        self._fetch_missing(step)
        buffer = next(buffer for buffer in self._buffers if buffer.step(self._fingerprint) == step)
        values = buffer.read(self._specs, _local_tensors(into))
        # The step just read is the newest whole one: the next copy must not go over it.
        self._turn = (self._buffers.index(buffer) + 1) % len(self._buffers)
        return values

    def _fetch_missing(self, step: int) -> None:
        """Processes that have nothing, because their node is new, get their state from the nodes that keep it."""
        for rank in self._ranks():
            if step not in self._holdings[rank].own:
                assert self._mirror is not None
                if self._together.rank in (rank, self._mirror.holder(rank)):
                    self._mirror.give_back(rank, step, self._buffers[0].snapshot.handle)

    def close(self) -> None:
        """Let go of the memory; what is in it stays as long as its owner lives."""
        if self._mirror is not None:
            self._mirror.close()
        for buffer in self._buffers:
            buffer.snapshot.close()

    def _plan(self, state: Mapping[str, Any]) -> None:
        if self._specs is not None:
            return
        rank, world_size = self._together.rank, self._together.world_size
        tensors, _ = split_state(state)
        held = [holding(name, tensor, rank, world_size) for name, tensor in tensors.items()]
        specs, self._size_bytes = lay_out([(item.name, item.dtype, item.shape, item.box) for item in held])
        by_piece = {(spec.tensor, spec.box): spec for spec in specs}
        self._specs = [by_piece[item.name, item.box] for item in held]
        told = json.dumps([rank, world_size, [spec.to_json() for spec in self._specs]])
        self._fingerprint = hashlib.sha256(told.encode()).hexdigest()


class _Buffer:
    """One step in one piece of memory."""

    def __init__(self, place: Path) -> None:
        self.snapshot = Snapshot(os.open(place, os.O_RDWR | os.O_CLOEXEC))

    def fill(
        self, plan: list[tuple[PieceSpec, torch.Tensor]], size_bytes: int, page: bytes, whole: Callable[[], None]
    ) -> None:
        """Begin to copy; `whole` is called, on another thread, once the step lies here whole."""
        forget(self.snapshot.handle)
        self.snapshot.ensure(size_bytes + PAGE_BYTES, any(tensor.is_cuda for _, tensor in plan))

        def copied(error: Exception | None) -> None:
            if error is None:
                write_page(self.snapshot.handle, page)
                whole()

        self.snapshot.start(plan, size_bytes + PAGE_BYTES, copied)

    def step(self, fingerprint: str) -> int | None:
        """The step that lies here whole, for this layout."""
        page = self._page()
        return int(page["step"]) if page is not None and page["fingerprint"] == fingerprint else None

    def read(self, specs: Sequence[PieceSpec], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        page = self._page()
        assert page is not None
        with mmap.mmap(self.snapshot.handle, 0) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for spec, tensor in zip(specs, tensors, strict=True):
                piece = whole[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
                with torch.no_grad():
                    tensor.copy_(piece.view(spec.box.shape))
            del whole, piece
        values: dict[str, Any] = page["values"]
        return values

    def _page(self) -> dict[str, Any] | None:
        return read_page(self.snapshot.handle)


def _local_tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors, _ = split_state(state)
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
