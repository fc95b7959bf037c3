"""Expert parallelism: processes divide the experts of a layer among them, and tokens travel to their experts and back.

Shape legend: n tokens, k experts of a token, m = n·k rows sorted by expert, r rows that arrive here, d hidden,
e experts, p processes, l = e / p experts on each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.models.moe import Experts, MoE
from keepstep.models.ops.backend import backend
from keepstep.models.ops.expert_rows import spread_rows, sum_rows
from keepstep.models.ops.routed_experts import Routes, sort_by_expert
from keepstep.models.transformer import Transformer
from keepstep.parallel.mesh import ParallelMesh
from keepstep.parallel.parts import ROWS, WHOLE, place_module

_OPS = torch.ops._c10d_functional


def split_experts(model: Transformer, mesh: ParallelMesh) -> None:
    """Divide the experts of a model (or a stage of one) on the meta device among processes, in place.

    Along the tensor axis routers and experts are whole: each process computes its own tokens with them.
    """
    for block in model.blocks.values():
        mlp = block.mlp
        if not isinstance(mlp, MoE):
            continue
        mlp.router.rows_group = mesh.rows_group
        if mesh.layout.tensor > 1:
            place_module(mlp.router, mesh.device_mesh["tensor"])
            if mlp.shared_gate is not None:
                place_module(mlp.shared_gate, mesh.device_mesh["tensor"])
        if mesh.experts_mesh is not None:
            placement = ROWS if mesh.layout.expert > 1 else WHOLE
            place_module(mlp.experts, mesh.experts_mesh, dict.fromkeys(mlp.experts._parameters, placement))
        if mesh.layout.expert > 1:
            mlp.dispatch = _Dispatch(mesh.device_mesh["expert"].get_group())


class _Dispatch:
    """Sends rows to the processes that hold their experts, and the results back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, experts: Experts, x_nd: Tensor, weights_nk: Tensor, routes: Routes) -> Tensor:
        """What `experts` would give if this process held all of them."""
        top_k, processes = weights_nk.shape[1], self._group.size()
        sent_pl = torch.diff(routes.ends_e, prepend=routes.ends_e.new_zeros(1)).view(processes, -1)
        arriving_pl = torch.empty_like(sent_pl)
        dist.all_to_all_single(arriving_pl, sent_pl.contiguous(), group=self._group)
        # The host waits here: it must know how much travels.
        sent, arriving = backend().row_counts(torch.stack([sent_pl.sum(1), arriving_pl.sum(1)]), x_nd.shape[0] * top_k)
        name = self._group.group_name
        there, back = (sent, arriving, name), (arriving, sent, name)
        x_rd = _exchange(_Rows.apply(x_nd, routes.place_m, top_k, True), there)  # type: ignore[no-untyped-call]
        weights_r1 = _exchange(weights_nk.flatten()[routes.order_m][:, None], there)
        # Rows arrive by process, and those of a process by expert.
        local_l = torch.arange(arriving_pl.shape[1], device=x_nd.device)
        chosen_r1 = local_l.repeat(processes).repeat_interleave(arriving_pl.flatten(), output_size=sum(arriving))[
            :, None
        ]
        out_rd = experts(x_rd, weights_r1, sort_by_expert(chosen_r1, arriving_pl.sum(0)))
        out_nd: Tensor = _Rows.apply(_exchange(out_rd, back), routes.place_m, top_k, False)  # type: ignore[no-untyped-call]
        return out_nd


def _exchange(x: Tensor, where: tuple[list[int], list[int], str]) -> Tensor:
    received: Tensor = _Exchange.apply(x, *where)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with uneven splits: the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], arriving: list[int], group_name: str) -> Tensor:
        ctx.back = arriving, sent, group_name
        received: Tensor = _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), arriving, sent, group_name))
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Exchange.forward(ctx, gradients[0], *ctx.back), None, None, None


class _Rows(torch.autograd.Function):
    """Tokens spread into rows sorted by expert, or a token's rows added up in a fixed order.

    Each is the gradient of the other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, place_m: Tensor, top_k: int, spreads: bool) -> Tensor:
        ctx.save_for_backward(place_m)
        ctx.rest = top_k, spreads
        rows: Tensor = (spread_rows if spreads else sum_rows)(x, place_m, top_k)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        top_k, spreads = ctx.rest
        return (sum_rows if spreads else spread_rows)(gradients[0], *ctx.saved_tensors, top_k), None, None, None
