"""Snapshots from one process to another: copies in the memory of another node, and the pieces that a restart lacks.

Every process sends its newest snapshots to its counterpart on the next node, in a background thread and over a process
group of its own: a lost node costs no more than a crash. Whoever needs the state of a lost node finds it there (see
sources.py) and requests it over the process group of the checkpoints.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.in_memory.footer import FOOTER_BYTES, clear_footer, write_footer
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import DTYPES
from keepstep.checkpoint.protocol.shards import PieceSpec
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice

CHUNK_BYTES = 64 * 1024 * 1024
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
        return [_started(dist.isend(piece, to, self._group, tag)) for tag, piece in enumerate(pieces)]

    def _receive(self, target: int, source: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        _started(dist.irecv(size, source, self._group, 0)).wait()
        clear_footer(target)
        os.ftruncate(target, int(size))
        memory = torch.frombuffer(mmap.mmap(target, 0), dtype=torch.uint8)
        # The footer, which declares the copy complete, is written last.
        footer = torch.empty(FOOTER_BYTES, dtype=torch.uint8)
        for tag, piece in enumerate([*memory[:-FOOTER_BYTES].split(CHUNK_BYTES), footer], start=1):
            _started(dist.irecv(piece, source, self._group, tag)).wait()
        write_footer(target, footer.numpy().tobytes())


@dataclass(frozen=True)
class Request:
    """A part of a piece in a buffer."""

    place: str
    spec: PieceSpec
    part: TensorSlice

    def to_json(self) -> list[Any]:
        """For the process that holds the buffer."""
        return [self.place, self.spec.to_json(), self.part.offset, self.part.shape]

    @staticmethod
    def from_json(raw: Sequence[Any]) -> Request:
        """Inverse of `to_json`."""
        place, spec, offset, shape = raw
        return Request(place, PieceSpec.from_json(spec), TensorSlice(tuple(offset), tuple(shape)))


def exchange(
    processes: ProcessGroupInfo,
    wanted: Mapping[int, Sequence[tuple[torch.Tensor, Request]]],
    read: Callable[[Request], torch.Tensor],
) -> None:
    """Fill tensors from the buffers of other processes, and send what those request. Collective."""
    letters = {holder: json.dumps([each.to_json() for _, each in parts]).encode() for holder, parts in wanted.items()}
    sizes: list[dict[int, int]] = processes.gather({holder: len(letter) for holder, letter in letters.items()})
    group, works = processes.group, []
    for holder, letter in letters.items():
        works.append(_started(dist.isend(torch.frombuffer(bytearray(letter), dtype=torch.uint8), holder, group, 0)))
    for rank, asked in enumerate(sizes):
        if processes.rank in asked:
            received = torch.empty(asked[processes.rank], dtype=torch.uint8)
            _started(dist.irecv(received, rank, group, 0)).wait()
            requests = [Request.from_json(raw) for raw in json.loads(received.numpy().tobytes())]
            for tag, chunk in enumerate(_chunks(read(request).contiguous() for request in requests), start=1):
                works.append(_started(dist.isend(chunk, rank, group, tag)))
    for holder, parts in wanted.items():
        _receive(parts, holder, group)
    for work in works:
        work.wait()


def _receive(parts: Sequence[tuple[torch.Tensor, Request]], holder: int, group: dist.ProcessGroup | None) -> None:
    tags = count(1)
    for target, request in parts:
        received = torch.empty(request.part.shape, dtype=DTYPES[request.spec.dtype])
        for chunk in _chunks([received]):
            _started(dist.irecv(chunk, holder, group, next(tags))).wait()
        target.copy_(received)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """As bytes: not every dtype can be sent."""
    for tensor in tensors:
        yield from tensor.reshape(-1).view(torch.uint8).split(CHUNK_BYTES)


def _started(work: dist.Work | None) -> dist.Work:
    """A transfer that torch has started."""
    assert work is not None
    return work
