"""Gather and scatter along a dim, each the other's gradient.

Written with the collectives that the compiler knows, so that compiled blocks keep them inside one graph and can overlap
them with products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = torch.ops._c10d_functional


def gather_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All processes' parts one after the other along `dim`; gradients of the whole are summed and scattered."""
    gathered: Tensor = _Gather.apply(x, dim, group.size(), group.group_name)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sums(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This process's part, along `dim`, of the sum over processes; gradients of the parts are gathered."""
    scattered: Tensor = _Scatter.apply(x, dim, group.size(), group.group_name)  # type: ignore[no-untyped-call]
    return scattered


def _gather(x: Tensor, dim: int, processes: int, group_name: str) -> Tensor:
    stacked: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), processes, group_name))
    return stacked if dim == 0 else torch.cat(stacked.chunk(processes), dim)


def _scatter(x: Tensor, dim: int, processes: int, group_name: str) -> Tensor:
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(processes, dim))
    scattered: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(stacked, "sum", processes, group_name))
    return scattered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, processes: int, group_name: str) -> Tensor:
        ctx.where = (dim, processes, group_name)
        return _gather(x, dim, processes, group_name)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _scatter(grad_outputs[0], *ctx.where), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, processes: int, group_name: str) -> Tensor:
        ctx.where = (dim, processes, group_name)
        return _scatter(x, dim, processes, group_name)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _gather(grad_outputs[0], *ctx.where), None, None, None
