"""The training state on its way from living replicas to one that joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from keepstep.resilience.survivors import state_copy
from keepstep.resilience.survivors.replica import Joining, Replica
from keepstep.train.recovery.rollback import local_tensors
from keepstep.train.state import TrainState


def serve_state(
    replica: Replica, state: TrainState, values: Callable[[], Mapping[str, Any]], settle: Callable[[], bool]
) -> bool:
    """Between two steps: let others join; whether the membership is another one now.

    All members send one part of the tensors, and the first also the plain `values`, for which `settle` reads every step
    in flight.
    """

    def serve(joining: list[Joining], part: int, parts: int, epoch: int) -> None:
        settle()
        buffers = [_bytes_of(tensor.contiguous().cpu()) for tensor in local_tensors(state.tensors())]
        plain = values() if part == 0 else {}
        for each in joining:
            state_copy.send(each.address, part, parts, epoch, buffers, plain)

    return replica.at_boundary(serve)


def copy_state(replica: Replica, state: TrainState) -> dict[str, Any]:
    """Join: take over the state of the living replicas; returns their plain values."""
    into = state.tensors()
    tensors = list(local_tensors(into))
    received = [torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format) for tensor in tensors]
    values = replica.copy_from_members([_bytes_of(tensor) for tensor in received])
    with torch.no_grad():
        for tensor, copy in zip(tensors, received, strict=True):
            tensor.copy_(copy)
    state.adopt(values["numbers"], into)
    return values


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
