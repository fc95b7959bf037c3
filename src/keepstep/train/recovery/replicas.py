"""The training state on its way from living replicas to one that joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepstep.checkpoint.protocol.layout import local_tensors
from keepstep.resilience.survivors.shared_numbers import Numbers
from keepstep.resilience.survivors.state_copy import Bytes, part_bounds
from keepstep.train.state import TrainState
from keepstep.train.step import TrainStep


class CommonState:
    """The state that all replicas have in common; see `ReplicaState`."""

    def __init__(
        self,
        state: TrainState,
        step: TrainStep,
        values: Callable[[], dict[str, Any]],
        settle: Callable[[], bool] = lambda: True,
    ) -> None:
        """`values` are the plain ones, for which `settle` reads every step in flight."""
        self._state, self._step, self._values, self._settle = state, step, values, settle
        self._into: dict[str, Any] = {}
        self._received: list[Tensor] = []

    def part(self, part: int, parts: int) -> Bytes:
        """A copy of one of `parts` equal parts of all tensors, in host memory."""
        tensors = local_tensors(self._state.tensors())
        first, end = part_bounds(sum(tensor.nbytes for tensor in tensors), part, parts)
        copy = np.empty(end - first, np.uint8)
        filled, start = 0, 0
        for tensor in tensors:
            low, high = max(first - start, 0), min(end - start, tensor.nbytes)
            if low < high:
                torch.from_numpy(copy[filled : filled + high - low]).copy_(_bytes_of(tensor)[low:high])
                filled += high - low
            start += tensor.nbytes
        return copy

    def values(self) -> dict[str, Any]:
        """Plain values, after every step in flight has been read."""
        self._settle()
        return self._values()

    def buffers(self) -> list[memoryview]:
        """Memory for all tensors: their own where they are in host memory already."""
        self._into = self._state.tensors()
        self._received = [
            tensor
            if tensor.device.type == "cpu" and tensor.is_contiguous()
            else torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
            for tensor in local_tensors(self._into)
        ]
        return [_bytes_of(tensor).numpy().data for tensor in self._received]

    def install(self) -> None:
        """Take over the tensors, which are complete."""
        with torch.no_grad():
            for tensor, copy in zip(local_tensors(self._into), self._received, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)
        self._state.optimizers.adopt(self._into["model"])

    def replay(self, facts: Mapping[str, Any], sums: Numbers) -> None:
        """Apply a step that the members have committed."""
        self._step.replay(facts, sums)

    def adopt(self, values: dict[str, Any]) -> None:
        """Take over the plain values, after all steps."""
        self._state.adopt_numbers(values["numbers"], self._into["rank"])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
