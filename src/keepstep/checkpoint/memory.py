"""The newest steps in memory that outlives the process: after a crash a run goes on from the step before it.

Two buffers take turns, so that a process killed in the middle of a copy still leaves the step before. A buffer is the
process's pieces back to back, then a page that says what they are, marked whole as the last act of the copy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.layout import DTYPES, holding, split_state
from keepstep.checkpoint.shards import PieceSpec, lay_out
from keepstep.checkpoint.snapshot import Snapshot
from keepstep.checkpoint.together import Together

PAGE_BYTES = 65536
_WHOLE = b"keepstep whole 1\n"


def holds_step(places: Sequence[Path]) -> bool:
    """Whether some step lies whole in one of the places, for whatever layout."""
    return any(_read_page(place) is not None for place in places)


class StepMemory:
    """Keeps this process's part of the newest steps in `places` and finds it there again.

    `newest` is collective; all else is this process's own affair. The layout must be the one that was kept: for any
    other there are checkpoints.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._together = Together()
        self._buffers = [_Buffer(place) for place in places]
        self._specs: list[PieceSpec] | None = None
        self._size_bytes = 0
        self._fingerprint = ""
        self._turn = 0

    def newest(self, state: Mapping[str, Any], before: int | None = None) -> int | None:
        """The newest step (`before` some step) that every process has whole for a state of this layout, or None."""
        self._plan(state)
        self.join()
        steps = {buffer.step(self._fingerprint) for buffer in self._buffers}
        own = {step for step in steps if step is not None and (before is None or step < before)}
        common = set.intersection(*self._together.gather(own))
        return max(common, default=None)

    def keep(self, step: int, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Begin to copy; the tensors must not change before `before_update` has returned."""
        self._plan(state)
        assert self._specs is not None
        self.join()
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        page = {"fingerprint": self._fingerprint, "step": step, "values": values}
        buffer.fill(list(zip(self._specs, _local_tensors(state), strict=True)), self._size_bytes, page)

    def before_update(self) -> None:
        """Call before anything changes the kept tensors."""
        for buffer in self._buffers:
            buffer.snapshot.before_update()

    def join(self) -> None:
        """Return when no copy is under way."""
        for buffer in self._buffers:
            buffer.snapshot.join()

    def load(self, step: int, into: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `into` in place and return the values that were kept with them."""
        assert self._specs is not None
        buffer = next(buffer for buffer in self._buffers if buffer.step(self._fingerprint) == step)
        values = buffer.read(self._specs, _local_tensors(into))
        # The step just read is the newest whole one: the next copy must not go over it.
        self._turn = (self._buffers.index(buffer) + 1) % len(self._buffers)
        return values

    def close(self) -> None:
        """Let go of the memory; what is in it stays as long as its owner lives."""
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

    def fill(self, plan: list[tuple[PieceSpec, torch.Tensor]], size_bytes: int, page: Mapping[str, Any]) -> None:
        text = json.dumps(page).encode()
        if len(text) + len(_WHOLE) > PAGE_BYTES:
            raise ValueError(f"{len(text)} bytes of plain values do not fit beside the tensors")
        self._forget()
        self.snapshot.ensure(size_bytes + PAGE_BYTES, any(tensor.is_cuda for _, tensor in plan))

        def copied(error: Exception | None) -> None:
            if error is None:
                self.snapshot.write(size_bytes + len(_WHOLE), text.ljust(PAGE_BYTES - len(_WHOLE)))
                self.snapshot.write(size_bytes, _WHOLE)

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

    def _forget(self) -> None:
        """What lies here is whole no more."""
        size = os.fstat(self.snapshot.handle).st_size
        if size >= PAGE_BYTES:
            os.pwrite(self.snapshot.handle, bytes(len(_WHOLE)), size - PAGE_BYTES)

    def _page(self) -> dict[str, Any] | None:
        return _page_of(self.snapshot.handle)


def _read_page(place: Path) -> dict[str, Any] | None:
    with place.open("rb") as file:
        return _page_of(file.fileno())


def _page_of(handle: int) -> dict[str, Any] | None:
    """What a buffer says of itself, if it is whole."""
    size = os.fstat(handle).st_size
    raw = os.pread(handle, PAGE_BYTES, size - PAGE_BYTES) if size >= PAGE_BYTES else b""
    if not raw.startswith(_WHOLE):
        return None
    page: dict[str, Any] = json.loads(raw[len(_WHOLE) :])
    return page


def _local_tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors, _ = split_state(state)
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
