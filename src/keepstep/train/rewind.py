"""Going back: the last two states in host memory, and the samples that are never to be used again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from keepstep.core.errors import DataError
from keepstep.train.state import TrainState

KEPT = 2
"""The newest state may be that of the very step that proves bad; then the one before it is what to go back to."""


@dataclass(frozen=True)
class _Kept:
    step: int
    numbers: dict[str, Any]
    tensors: list[Tensor]


class Rewind:
    """Copies of the training state, in memory that is allocated once and used in turn."""

    def __init__(self, state: TrainState, every: int) -> None:
        self._state = state
        self._every = every
        self._kept: list[_Kept] = []

    def keep(self, step: int) -> None:
        """Keep the state after `step`, where it is due."""
        if self._kept and step < self._kept[-1].step + self._every:
            return
        live = list(_local_tensors(self._state.tensors()))
        spare = self._kept.pop(0).tensors if len(self._kept) == KEPT else [_beside(tensor) for tensor in live]
        for copy, tensor in zip(spare, live, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._kept.append(_Kept(step, self._state.numbers(), spare))

    def restore(self, before: int) -> int:
        """Go back to the newest state before step `before` and forget later ones; returns its step."""
        self._kept = [kept for kept in self._kept if kept.step < before]
        kept = self._kept[-1]
        into = self._state.tensors()
        with torch.no_grad():
            for tensor, copy in zip(_local_tensors(into), kept.tensors, strict=True):
                tensor.copy_(copy)
        self._state.adopt(kept.numbers, into)
        return kept.step


def _local_tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, Mapping):
            yield from _local_tensors(value)
        elif isinstance(value, DTensor):
            yield value.to_local().detach()
        elif isinstance(value, Tensor):
            yield value.detach()


def _beside(tensor: Tensor) -> Tensor:
    """Host memory for a copy; pinned, so that a GPU's copy runs behind its work."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class SkippedSamples:
    """Ranges of training samples that are left out, in a file of the run's folder that is only ever added to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_first = dist.get_rank() == 0
        # One process reads for all: others may not see the folder, or not yet the newest line.
        found: list[Any] = [read_skipped(path) if self._is_first else None]
        dist.broadcast_object_list(found)
        self.ranges: list[tuple[int, int]] = found[0]
        """First sample and count of each."""

    def add(self, first_sample: int, count: int, step: int) -> None:
        """Leave these out from now on; on disk when this returns."""
        self.ranges.append((first_sample, count))
        if self._is_first:
            written = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
            with self._path.open("a", encoding="utf-8") as file:
                # Whoever wrote the file by hand may have left its last line without an end.
                file.write("\n" if written and not written.endswith("\n") else "")
                file.write(json.dumps({"first_sample": first_sample, "count": count, "step": step}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def read_skipped(path: Path) -> list[tuple[int, int]]:
    """First sample and count of each range in a run's file; none where there is no file."""
    if not path.is_file():
        return []
    ranges = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            ranges.append((int(record["first_sample"]), int(record["count"])))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} line {number} is not a range of samples", 'lines look like {"first_sample": 0, "count": 8}'
            ) from error
    return ranges
