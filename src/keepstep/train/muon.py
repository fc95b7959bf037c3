"""Muon: momentum whose matrix is pushed towards the nearest orthogonal one before it moves the weights.

The orthogonalisation needs whole matrices. Momentum is kept sharded like the weights; the update is gathered,
orthogonalised on every process (the same bits on each) and cut back, so any world size gives the same step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic iteration that is steep at zero: five rounds bring singular values near one."""


def orthogonalise(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Replace the singular values of `matrix` by values near one (Newton–Schulz)."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.T if tall else x
    return orthogonal.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with an orthogonalised update, for matrices only."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = _whole_update(parameter.grad.lerp(momentum, group["momentum"]), parameter)
                # Scaled so that a unit learning rate moves each entry as far as Adam would in a square matrix.
                scale = max(1.0, parameter.size(0) / parameter.size(1)) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def _whole_update(direction: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or not isinstance(direction, DTensor):
        return orthogonalise(direction)
    whole = orthogonalise(direction.full_tensor())
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
