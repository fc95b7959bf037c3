"""Which tensors differ between two steps, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from keepstep.checkpoint.offline import OpenStep


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both."""

    name: str
    kind: Literal["only_in_first", "only_in_second", "shape", "dtype", "values"]
    detail: str
    differing: int = 0
    """Elements that differ."""
    largest: float = 0.0
    """Largest absolute difference."""


def differences(first: OpenStep, second: OpenStep) -> tuple[list[Difference], int]:
    """All differences, by name, and how many tensors were compared; one tensor of each is in memory at a time."""
    found: list[Difference] = []
    ours, theirs = first.manifest.tensors, second.manifest.tensors
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            found.append(Difference(name, "only_in_first", f"{ours[name].dtype} {list(ours[name].shape)}"))
        elif name not in ours:
            found.append(Difference(name, "only_in_second", f"{theirs[name].dtype} {list(theirs[name].shape)}"))
        elif ours[name].shape != theirs[name].shape:
            found.append(Difference(name, "shape", f"{list(ours[name].shape)} and {list(theirs[name].shape)}"))
        elif ours[name].dtype != theirs[name].dtype:
            found.append(Difference(name, "dtype", f"{ours[name].dtype} and {theirs[name].dtype}"))
        else:
            difference = _values(name, first.tensor(name), second.tensor(name))
            if difference is not None:
                found.append(difference)
    return found, len({*ours} & {*theirs})


def _values(name: str, left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    # Bytes, not values: NaN equals NaN here, and 0.0 is not -0.0.
    same = (left.reshape(-1, 1).view(torch.uint8) == right.reshape(-1, 1).view(torch.uint8)).all(dim=1)
    differing = int((~same).sum())
    if not differing:
        return None
    largest = float((left.reshape(-1).double() - right.reshape(-1).double())[~same].abs().max())
    detail = f"{differing} of {left.numel()} elements, largest difference {largest:.3g}"
    return Difference(name, "values", detail, differing, largest)
