"""Copies of each process's newest snapshots in the memory of another node: a lost node costs no more than a crash.

Every process sends its snapshots to its counterpart on the next node, in a background thread and over a process group
of its own. Whoever needs the state of a lost node finds it there (see sources.py).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from keepstep.checkpoint.in_memory.footer import FOOTER_BYTES, clear_footer, write_footer
from keepstep.checkpoint.in_memory.transfer import CHUNK_BYTES, started

CLOSE_TIMEOUT_S = 10.0
"""How long the last copy may take when a run ends: a process that is gone would block it forever."""


class Mirror:
    """Sends this process's snapshots to one process and receives those of another. All processes create one."""

    def __init__(self, places: Sequence[Path], ranks_per_node: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._to, self._from = (rank + ranks_per_node) % world_size, (rank - ranks_per_node) % world_size
        self._fds = [os.open(place, os.O_RDWR | os.O_CLOEXEC) for place in places]
        self.next = 0
        """The buffer that is overwritten next."""
        self._thread: threading.Thread | None = None

    def exchange(self, fd: int) -> None:
        """Send one snapshot and receive the other process's, in a thread. All processes call this for the same step."""
        self.join()
        target = self._fds[self.next]
        self.next = (self.next + 1) % len(self._fds)
        self._thread = threading.Thread(target=self._exchange, args=(fd, target), name="mirror", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until no copy is under way, or until the timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def close(self) -> None:
        """Stop copying; the snapshots stay as long as the agent that owns the memory."""
        self.join(CLOSE_TIMEOUT_S)

    def _exchange(self, source: int, target: int) -> None:
        try:
            works = self._send(source, self._to)
            self._receive(target, self._from)
            for work in works:
                work.wait()
        except RuntimeError:
            # The other process is gone: the restart that follows finds this copy incomplete and uses an older one.
            return

    def _send(self, source: int, to: int) -> list[dist.Work]:
        size = os.fstat(source).st_size
        memory = torch.frombuffer(mmap.mmap(source, 0), dtype=torch.uint8)
        pieces = [torch.tensor([size]), *memory[:-FOOTER_BYTES].split(CHUNK_BYTES), memory[-FOOTER_BYTES:].clone()]
        return [started(dist.isend(piece, to, self._group, tag)) for tag, piece in enumerate(pieces)]

    def _receive(self, target: int, source: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        started(dist.irecv(size, source, self._group, 0)).wait()
        clear_footer(target)
        os.ftruncate(target, int(size))
        memory = torch.frombuffer(mmap.mmap(target, 0), dtype=torch.uint8)
        # The footer, which declares the copy complete, is written last.
        footer = torch.empty(FOOTER_BYTES, dtype=torch.uint8)
        for tag, piece in enumerate([*memory[:-FOOTER_BYTES].split(CHUNK_BYTES), footer], start=1):
            started(dist.irecv(piece, source, self._group, tag)).wait()
        write_footer(target, footer.numpy().tobytes())
