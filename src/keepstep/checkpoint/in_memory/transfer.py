"""Pieces of snapshots from one process to another, over the process group of the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol.layout import DTYPES
from keepstep.checkpoint.protocol.shards import PieceSpec
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice

CHUNK_BYTES = 64 * 1024 * 1024


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
        works.append(started(dist.isend(torch.frombuffer(bytearray(letter), dtype=torch.uint8), holder, group, 0)))
    for rank, asked in enumerate(sizes):
        if processes.rank in asked:
            received = torch.empty(asked[processes.rank], dtype=torch.uint8)
            started(dist.irecv(received, rank, group, 0)).wait()
            requests = [Request.from_json(raw) for raw in json.loads(received.numpy().tobytes())]
            for tag, chunk in enumerate(_chunks(read(request).contiguous() for request in requests), start=1):
                works.append(started(dist.isend(chunk, rank, group, tag)))
    for holder, parts in wanted.items():
        _receive(parts, holder, group)
    for work in works:
        work.wait()


def _receive(parts: Sequence[tuple[torch.Tensor, Request]], holder: int, group: dist.ProcessGroup | None) -> None:
    tags = count(1)
    for target, request in parts:
        received = torch.empty(request.part.shape, dtype=DTYPES[request.spec.dtype])
        for chunk in _chunks([received]):
            started(dist.irecv(chunk, holder, group, next(tags))).wait()
        target.copy_(received)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """As bytes: not every dtype can be sent."""
    for tensor in tensors:
        yield from tensor.reshape(-1).view(torch.uint8).split(CHUNK_BYTES)


def started(work: dist.Work | None) -> dist.Work:
    """A transfer that torch has started."""
    assert work is not None
    return work
