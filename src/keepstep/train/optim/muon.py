"""Muon: momentum that is orthogonalised before it updates the weights.

The orthogonalisation needs whole matrices. Momentum is kept sharded like the weights. Matrices of one shape are
orthogonalised together; where FSDP shards them by rows, each process gets some of them whole, orthogonalises these and
sends the rows back. Replicas divide them too. So no process computes what another one does, and a matrix has the same
bits whoever computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keepstep.models.ops.backend import backend
from keepstep.train.optim.master_weights import MasterWeights
from keepstep.train.optim.newton_schulz import orthogonalise

_BATCH = 1 << 28
"""Numbers that are orthogonalised together: enough to fill a GPU, and little memory next to the activations."""


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
        for group in self.param_groups:
            for batch in _batches(group["params"]):
                given = [(each, self._gradient(each)) for each in batch]
                learned = [(each, gradient) for each, gradient in given if gradient is not None]
                directions = [self._direction(each, gradient, group, factor) for each, gradient in learned]
                chosen = [each for each, _ in learned]
                for parameter, update in zip(chosen, _orthogonal(directions, chosen), strict=True):
                    self._apply(parameter, update, group, factor)

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return self._masters.gradient(parameter) if self._masters else parameter.grad

    def _direction(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], factor: Tensor) -> Tensor:
        """Where the momentum points, this process's part of it."""
        beta = group["momentum"]
        own, momentum = local(gradient), local(self.state[parameter]["momentum"])
        if own.numel() and backend().has_muon(own) and own.is_contiguous():
            return backend().momentum_(own, momentum, factor, beta)
        counts = torch.isfinite(factor).float()
        scaled = torch.nan_to_num(own.float() * factor, nan=0.0, posinf=0.0, neginf=0.0)
        momentum.add_((scaled - momentum) * ((1 - beta) * counts))
        return scaled.lerp(momentum, beta)

    def _apply(self, parameter: nn.Parameter, direction: Tensor, group: dict[str, Any], factor: Tensor) -> None:
        # Scaled so that a unit learning rate moves each entry as far as Adam would in a square matrix.
        scale = max(1.0, parameter.size(-2) / parameter.size(-1)) ** 0.5
        keep, step = 1 - group["lr"] * group["weight_decay"], -group["lr"] * scale
        if self._masters and backend().has_muon(direction):
            backend().add_direction_((parameter.data, self._masters.low(parameter)), direction, factor, keep, step)
            return
        counts = torch.isfinite(factor).float()
        weight = self._masters.read(parameter) if self._masters else local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"] * counts).add_(direction.to(weight.dtype) * (step * counts))
        if self._masters:
            self._masters.write(parameter, weight)


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one shape and sharding, as many together as the batch may hold."""
    alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        where = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        alike[parameter.shape, where].append(parameter)
    for same in alike.values():
        count = max(1, _BATCH // same[0].numel())
        for first in range(0, len(same), count):
            yield same[first : first + count]


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonal(directions: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """This process's part of each orthogonalised direction."""
    if not directions:
        return []
    first = parameters[0]
    if not isinstance(first, DTensor) or _has_whole_matrices(first):
        return list(orthogonalise(torch.stack(directions)).unbind())
    axis = _row_axis(first)
    # Offloaded shards are communicated through the devices of the mesh.
    on_device = [each.to(first.device_mesh.device_type) for each in directions]
    if axis is not None:
        shared = _shared(torch.stack(on_device), first.device_mesh.get_group(axis), _replicas(first))
        return [each.to(first.device) for each in shared]
    return [_gathered(each, first).to(first.device) for each in on_device]


def _has_whole_matrices(parameter: DTensor) -> bool:
    """Whether a process's part of a stack of matrices is some of them: experts that are sharded by expert."""
    return parameter.ndim == 3 and all(place in (Shard(0), Replicate()) for place in parameter.placements)


def _row_axis(parameter: DTensor) -> int | None:
    """The only axis of the mesh that divides a parameter, if it divides its rows evenly."""
    dividing = [axis for axis, place in enumerate(parameter.placements) if not place.is_replicate()]
    if len(dividing) != 1 or parameter.placements[dividing[0]] != Shard(0):
        return None
    even = parameter.shape[0] % parameter.device_mesh.size(dividing[0]) == 0
    return dividing[0] if even and parameter.ndim == 2 else None


def _replicas(parameter: DTensor) -> dist.ProcessGroup | None:
    """The processes that hold the same part of a parameter, if there is one axis of them."""
    copies = [axis for axis, place in enumerate(parameter.placements) if place.is_replicate()]
    return parameter.device_mesh.get_group(copies[0]) if len(copies) == 1 else None


def _shared(parts_nrc: Tensor, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> list[Tensor]:
    """Rows of n orthogonalised matrices, from the same rows of the matrices; each process computes some of them."""
    count, processes = len(parts_nrc), group.size()
    share = -(-count // processes)
    padded = torch.cat([parts_nrc, parts_nrc.new_zeros(share * processes - count, *parts_nrc.shape[1:])])
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    # From each process its rows of our share; a matrix is all rows of one of them.
    by_process = received.unflatten(0, (processes, share))
    whole = _divided(by_process.transpose(0, 1).flatten(1, 2).contiguous(), replicas)
    back = whole.unflatten(1, (processes, -1)).transpose(0, 1).contiguous().flatten(0, 1)
    dist.all_to_all_single(received, back, group=group)
    return list(received[:count].unbind())


def _divided(whole_nrc: Tensor, replicas: dist.ProcessGroup | None) -> Tensor:
    """Matrices that all replicas have, orthogonalised: each replica computes some of them and sends them to all."""
    if replicas is None or replicas.size() == 1:
        return orthogonalise(whole_nrc)
    count, share = len(whole_nrc), -(-len(whole_nrc) // replicas.size())
    first = min(count, replicas.rank() * share)
    own = whole_nrc[first : first + share]
    padded = torch.cat([orthogonalise(own), own.new_zeros(share - len(own), *own.shape[1:])])
    everyone = padded.new_empty((replicas.size() * share, *own.shape[1:]))
    dist.all_gather_into_tensor(everyone, padded, group=replicas)
    return everyone[:count]


def _gathered(direction: Tensor, parameter: DTensor) -> Tensor:
    """The same for any other sharding: every process gathers the matrix and computes all of it."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = DTensor.from_local(
        direction, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    whole = orthogonalise(sharded.full_tensor())
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
