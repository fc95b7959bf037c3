"""Global gradient norm and clipping over sharded parameters, in few passes and without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class HasGradient(Protocol):
    """A parameter, or something that holds its gradient."""

    grad: Tensor | None


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This process's part of every gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def gradient_norm(parameters: Iterable[HasGradient], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm over all gradients, the same scalar on every process.

    torch's own function refuses parameters on different meshes. Here each kind of sharding is summed over the axes it
    is split along. `stages` is the group of processes with the other stages of a pipeline, whose norms are added.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            axes = [axis for axis, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
            groups[tuple(mesh.get_group(axis) for axis in axes)].append(gradient.to_local())
        else:
            groups[()].append(gradient)
    squares = []
    for process_groups, gradients in groups.items():
        filled = [gradient for gradient in gradients if gradient.numel()]
        zero = gradients[0].new_zeros((), dtype=torch.float32)
        norms = torch._foreach_norm(filled, 2.0, dtype=torch.float32) if filled else [zero]
        square = torch.stack(list(norms)).square().sum()
        for group in process_groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by a device scalar."""
    gradients = local_gradients(parameters)
    if gradients:
        # Offloaded parameters have their gradients in host memory.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What brings a gradient of this norm down to `limit`; 1 where it is within."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
