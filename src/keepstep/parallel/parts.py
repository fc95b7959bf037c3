"""Parts of tensors: gather and scatter along a dim, and weights that live as parts of a whole.

Gather and scatter are written with the collectives that the compiler knows, so that compiled blocks keep them inside
one graph and can overlap them with matmuls.

FSDP, checkpoints and initialisation see each parameter as a part of the whole one (a DTensor). The code of modules must
not: its kernels know nothing of processes. So while a module's forward runs, its parameters read as this process's
parts, plain local tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

_OPS = torch.ops._c10d_functional
WHOLE = Replicate()
"""Every process holds it all and sees a part of its uses: gradients add up."""
ROWS, COLUMNS = Shard(0), Shard(1)


def gather_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All processes' parts one after the other along `dim`; gradients of the whole are summed and scattered."""
    gathered: Tensor = _Exchange.apply(x, True, dim, group.size(), group.group_name)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sums(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This process's part, along `dim`, of the sum over processes; gradients of the parts are gathered."""
    scattered: Tensor = _Exchange.apply(x, False, dim, group.size(), group.group_name)  # type: ignore[no-untyped-call]
    return scattered


def sum_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over processes, on each; so are gradients, because every process uses it."""
    total: Tensor = _Sum.apply(x, group.group_name)  # type: ignore[no-untyped-call]
    return total


def _gather(x: Tensor, dim: int, processes: int, group_name: str) -> Tensor:
    stacked: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), processes, group_name))
    return stacked if dim == 0 else torch.cat(stacked.chunk(processes), dim)


def _scatter(x: Tensor, dim: int, processes: int, group_name: str) -> Tensor:
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(processes, dim))
    scattered: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(stacked, "sum", processes, group_name))
    return scattered


class _Exchange(torch.autograd.Function):
    """Gathers or scatters: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers: bool, dim: int, processes: int, group_name: str) -> Tensor:
        ctx.gathers, ctx.where = gathers, (dim, processes, group_name)
        return (_gather if gathers else _scatter)(x, dim, processes, group_name)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        inverse = _scatter if ctx.gathers else _gather
        return inverse(grad_outputs[0], *ctx.where), None, None, None, None


class _Sum(torch.autograd.Function):
    """Adds up in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        total: Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", group_name))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _OPS.wait_tensor(_OPS.all_reduce(grad_outputs[0].contiguous(), "sum", ctx.group_name)), None


def local_part(parameter: Tensor, placement: Placement) -> Tensor:
    """This process's part of a parameter, differentiable."""
    if not isinstance(parameter, DTensor):
        return parameter
    first = Partial() if isinstance(placement, Replicate) else placement
    part: Tensor = parameter.to_local(grad_placements=[first, *[Partial()] * (parameter.device_mesh.ndim - 1)])
    return part


def place_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Distribute one parameter over the mesh's first axis, whole along others; its users take the `local_part`."""
    whole = module._parameters[name]
    assert whole is not None
    placements = [placement, *[WHOLE] * (mesh.ndim - 1)]
    part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
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
    placed: dict[str, Placement] = {}
    for name in [name for name, held in module._parameters.items() if held is not None]:
        placement = placed[name] = (placements or {}).get(name, WHOLE)
        place_parameter(module, name, mesh, placement)
        readers[name] = _LocalReader(name, placement, (shares or {}).get(name, 1.0))
    # A class of its own for this one module: attributes of a class win over a module's table of parameters.
    kind = type(module)
    module.__class__ = type(f"Local{kind.__name__}", (_Computing, kind), {**readers, "placements": placed})


class _Computing(nn.Module):
    """Knows whether its forward is running: FSDP must find the parameters themselves at all other times."""

    is_computing = False
    placements: Mapping[str, Placement]

    def local_parameters(self) -> dict[str, Tensor]:
        """This process's parts of the module's parameters, for operators that compute with them elsewhere."""
        return {name: local_part(getattr(self, name), place) for name, place in self.placements.items()}

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
