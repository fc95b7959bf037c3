"""A copy of each process's newest steps in the memory of another node, so that a lost node costs no more than a crash.

Every process sends what it has kept to its counterpart on the next node, behind training, over a group of its own.
After a node was replaced, its processes get their state back from there.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from keepstep.checkpoint.page import PAGE_BYTES, forget, read_page, write_page

CHUNK_BYTES = 64 * 1024 * 1024
JOIN_AT_END_S = 10.0
"""How long the last copy may take to arrive when a run ends; a process that is gone would keep it waiting for good."""


class Mirror:
    """This process's part: it sends to one process and takes from another. Made by all processes together."""

    def __init__(self, places: Sequence[Path], neighbours: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._to, self._from = (rank + neighbours) % world_size, (rank - neighbours) % world_size
        self._handles = [os.open(place, os.O_RDWR | os.O_CLOEXEC) for place in places]
        self._turn = 0
        self._thread: threading.Thread | None = None

    def holder(self, rank: int) -> int:
        """Who keeps the copy of a process's state."""
        world_size = dist.get_world_size()
        return (rank + (self._to - dist.get_rank())) % world_size

    def exchange(self, handle: int) -> None:
        """Send the step behind a handle and take the other's of the same step, in a thread. All processes do so."""
        self.join()
        target = self._handles[self._turn]
        self._turn = (self._turn + 1) % len(self._handles)
        self._thread = threading.Thread(target=self._exchange, args=(handle, target), name="mirror", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Return when no copy is under way, or when the time is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def steps(self) -> dict[int, str]:
        """The steps kept here for another process, each with the layout it is for."""
        pages = [read_page(handle) for handle in self._handles]
        return {int(page["step"]): str(page["fingerprint"]) for page in pages if page is not None}

    def give_back(self, rank: int, step: int, handle: int) -> None:
        """Return a kept step to the process it belongs to; called by that process and by its holder alone."""
        if dist.get_rank() == rank:
            self._receive(handle, self.holder(rank))
            return
        kept = next(own for own in self._handles if (page := read_page(own)) is not None and page["step"] == step)
        for work in self._send(kept, rank):
            work.wait()

    def close(self) -> None:
        """Let go of the memory; what is in it stays as long as its owner lives."""
        self.join(JOIN_AT_END_S)

    def _exchange(self, source: int, target: int) -> None:
        try:
            works = self._send(source, self._to)
            self._receive(target, self._from)
            for work in works:
                work.wait()
        except RuntimeError:
            # The other process is gone: the restart that follows finds this copy unfinished and uses an older one.
            return

    def _send(self, source: int, to: int) -> list[dist.Work]:
        size = os.fstat(source).st_size
        memory = torch.frombuffer(mmap.mmap(source, 0), dtype=torch.uint8)
        pieces = [torch.tensor([size]), *memory[:-PAGE_BYTES].split(CHUNK_BYTES), memory[-PAGE_BYTES:].clone()]
        return [_begun(dist.isend(piece, to, self._group, tag)) for tag, piece in enumerate(pieces)]

    def _receive(self, target: int, source: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        _begun(dist.irecv(size, source, self._group, 0)).wait()
        forget(target)
        os.ftruncate(target, int(size))
        memory = torch.frombuffer(mmap.mmap(target, 0), dtype=torch.uint8)
        # The page that calls the copy whole goes in last.
        page = torch.empty(PAGE_BYTES, dtype=torch.uint8)
        for tag, piece in enumerate([*memory[:-PAGE_BYTES].split(CHUNK_BYTES), page], start=1):
            _begun(dist.irecv(piece, source, self._group, tag)).wait()
        write_page(target, page.numpy().tobytes())


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
