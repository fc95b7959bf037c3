"""Muon: momentum that is orthogonalised before it updates the weights.

The orthogonalisation needs whole matrices. Momentum is kept sharded like the weights; the update is gathered,
orthogonalised on every process (the same bits on each) and sharded again, so any world size gives the same step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from keepstep.train.optim.master_weights import MasterWeights

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic iteration that is steep at zero: five rounds bring singular values near one."""


def orthogonalise(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Replace the singular values of a matrix, or of each in a stack, by values near one (Newton–Schulz)."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.mT if tall else x
    return orthogonal.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with an orthogonalised update, for matrices only."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float,
        weight_decay: float,
        masters: MasterWeights | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._masters = masters

    @torch.no_grad()
    def update(self, factor: Tensor) -> None:
        """One step with every gradient multiplied by `factor`, a device scalar; none where that is not finite.

        A skipped step goes through the same arithmetic with zeros, so that the host need not wait for the device.
        """
        # Offloaded parameters have their gradients in host memory.
        factor = factor.to(self.param_groups[0]["params"][0].device)
        counts = torch.isfinite(factor).float()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self._masters.gradient(parameter) if self._masters else parameter.grad
                if gradient is not None:
                    scaled = torch.nan_to_num(gradient.float() * factor, nan=0.0, posinf=0.0, neginf=0.0)
                    self._update_one(parameter, scaled, group, counts)

    def _update_one(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], counts: Tensor) -> None:
        momentum = self.state[parameter]["momentum"]
        momentum.add_((gradient - momentum) * ((1 - group["momentum"]) * counts))
        direction = _whole_update(gradient.lerp(momentum, group["momentum"]), parameter)
        weight = self._masters.read(parameter) if self._masters else parameter
        # Scaled so that a unit learning rate moves each entry as far as Adam would in a square matrix.
        scale = max(1.0, parameter.size(-2) / parameter.size(-1)) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"] * counts).add_(direction * (-group["lr"] * scale * counts))
        if self._masters:
            self._masters.write(parameter, weight)


def _whole_update(direction: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or not isinstance(direction, DTensor):
        return orthogonalise(direction)
    mesh = parameter.device_mesh
    # Offloaded shards are gathered on the devices that the processes communicate through.
    on_device = direction.to(mesh.device_type)
    assert isinstance(on_device, DTensor)
    whole = orthogonalise(on_device.full_tensor())
    return distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None).to(parameter.device)
