"""Weights that live as parts of a whole (DTensors) and compute as plain local tensors.

FSDP, checkpoints and initialisation see each parameter as a part of the whole one. The code of modules must not: its
kernels know nothing of processes. So while a module's forward runs, its parameters read as this process's parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

WHOLE = Replicate()
"""Every process holds it all and sees a part of its uses: gradients add up."""
ROWS, COLUMNS = Shard(0), Shard(1)


def local_part(parameter: Tensor, placement: Placement) -> Tensor:
    """This process's part of a parameter, differentiable."""
    if not isinstance(parameter, DTensor):
        return parameter
    part: Tensor = parameter.to_local(grad_placements=[Partial() if isinstance(placement, Replicate) else placement])
    return part


def place_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Give one parameter its place on the mesh's one axis; whoever uses it takes its `local_part`."""
    whole = module._parameters[name]
    assert whole is not None
    part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


def place_module(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement] | None = None,
    shares: Mapping[str, float] | None = None,
) -> None:
    """Place every parameter the module itself holds, and let its forward read them as local parts.

    Those not named stay whole. A parameter with a share is read multiplied by it.
    """
    readers: dict[str, Any] = {}
    for name in [name for name, held in module._parameters.items() if held is not None]:
        placement = (placements or {}).get(name, WHOLE)
        place_parameter(module, name, mesh, placement)
        readers[name] = _LocalReader(name, placement, (shares or {}).get(name, 1.0))
    # A class of its own for this one module: attributes of a class win over a module's table of parameters.
    kind = type(module)
    module.__class__ = type(f"Local{kind.__name__}", (_Computing, kind), readers)


class _Computing(nn.Module):
    """Knows whether its forward is running: FSDP must find the parameters themselves at all other times."""

    is_computing = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.is_computing = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.is_computing = False


class _LocalReader:
    """A parameter of a module that reads as this process's part of it while the module computes."""

    def __init__(self, name: str, placement: Placement, share: float) -> None:
        self._name = name
        self._placement = placement
        self._share = share

    def __get__(self, module: _Computing, _owner: type) -> Tensor | None:
        parameter = module._parameters[self._name]
        if parameter is None or not module.is_computing:
            return parameter
        local = local_part(parameter, self._placement)
        return local if self._share == 1.0 else local * self._share

    def __set__(self, module: nn.Module, value: nn.Parameter) -> None:
        module._parameters[self._name] = value
