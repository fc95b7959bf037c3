"""Weights that live as parts of a whole (DTensors) and compute as plain local tensors.

FSDP, checkpoints and initialisation see each parameter as a part of the whole one. Modules must not: their kernels
know nothing of processes. So reading the parameter from its module gives this process's part.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

WHOLE = Replicate()
"""Every process holds it all and sees a part of its uses: gradients add up."""
ROWS, COLUMNS = Shard(0), Shard(1)


class _LocalParameter:
    """A parameter of a module that reads as this process's part of it."""

    def __init__(self, name: str, placement: Placement, share: float) -> None:
        self._name = name
        self._gradient = [Partial()] if isinstance(placement, Replicate) else [placement]
        self._share = share

    def __get__(self, module: nn.Module, _owner: type) -> Tensor:
        parameter = module._parameters[self._name]
        assert isinstance(parameter, DTensor)
        local: Tensor = parameter.to_local(grad_placements=self._gradient)
        return local if self._share == 1.0 else local * self._share

    def __set__(self, module: nn.Module, value: nn.Parameter) -> None:
        module._parameters[self._name] = value


def place_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Give each parameter the module itself holds its place on the mesh; those not named stay whole on each process."""
    places = {name: placements.get(name, WHOLE) for name, held in module._parameters.items() if held is not None}
    _place(module, mesh, places, {})


def place_summed_linear(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Split a linear by its inputs: outputs of all processes add up, so each adds its share of the bias only."""
    places: dict[str, Placement] = {"weight": COLUMNS}
    if linear.bias is not None:
        places["bias"] = WHOLE
    _place(linear, mesh, places, {"bias": 1.0 / mesh.size()})


def _place(module: nn.Module, mesh: DeviceMesh, places: Mapping[str, Placement], shares: Mapping[str, float]) -> None:
    readers = {}
    for name, placement in places.items():
        whole = module._parameters[name]
        assert whole is not None
        part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
        readers[name] = _LocalParameter(name, placement, shares.get(name, 1.0))
    if readers:
        # A class of its own for this one module: attributes of a class win over a module's table of parameters.
        kind = type(module)
        module.__class__ = type(f"Local{kind.__name__}", (kind,), readers)
