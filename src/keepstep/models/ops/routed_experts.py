"""The experts of all tokens as one autograd step: sort, grouped matmuls with SwiGLU between them, weighted sum.

A row is multiplied by the router's weight inside SwiGLU and not after the second matmul. So the outputs of experts need
not be saved. The backward pass sorts rows and computes SwiGLU again, so what is saved for each of a token's experts
is its gates and ups alone.

In fp8 the two matmuls of the forward pass take e4m3 numbers, tokens and activations with a scale for each row, weights
with one for each expert. The backward pass is the same as in bf16, as if nothing had been rounded (straight-through).

Shape legend: n tokens, k experts of a token, m = n·k rows sorted by expert, d hidden, e experts, f width of an expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.models.ops.expert_matmuls import (
    expert_d_gate_up,
    expert_down,
    expert_down_fp8,
    expert_dx,
    expert_gate_up,
    expert_gate_up_fp8,
    expert_outer,
)
from keepstep.models.ops.expert_rows import quantize_rows, spread_rows, sum_rows


class Routes(NamedTuple):
    """Where the rows of every expert are. Slot i·k + j is expert j of token i."""

    order_m: Tensor
    """Slots sorted by expert, those of an expert in the order of tokens."""
    place_m: Tensor
    """The inverse: where each slot is after sorting."""
    ends_e: Tensor
    """Expert i ends before this sorted row, int32."""


def sort_by_expert(chosen_nk: Tensor, tokens_e: Tensor) -> Routes:
    """The routes of tokens whose experts are `chosen_nk`."""
    # Stable: the order of equal keys would otherwise be free, and with it the bits of sums. Short keys sort faster.
    order_m = chosen_nk.flatten().to(torch.int16).argsort(stable=True)
    slots_m = torch.arange(order_m.shape[0], device=order_m.device)
    place_m = torch.empty_like(order_m).scatter_(0, order_m, slots_m)
    return Routes(order_m, place_m, tokens_e.cumsum(0).to(torch.int32))


def fp32_linear(x_nd: Tensor, weight_ed: Tensor) -> Tensor:
    """x · weightᵀ of bf16 matrices as fp32, [n, e]."""
    out_ne: Tensor = _Fp32Linear.apply(x_nd, weight_ed)  # type: ignore[no-untyped-call]
    return out_ne


def routed_experts(
    x_nd: Tensor, weights_nk: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, *, fp8: bool = False
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, [n, d]; with `fp8`, of bf16 tensors."""
    out_nd: Tensor = _RoutedExperts.apply(x_nd, weights_nk, gate_up, down, fp8, *routes)  # type: ignore[no-untyped-call]
    return out_nd


def _forward(
    x_nd: Tensor, weight_m: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, top_k: int
) -> tuple[Tensor, Tensor]:
    """Gates and ups, and the outputs of experts, both sorted by expert."""
    x_md = spread_rows(x_nd, routes.place_m, top_k)
    gate_up_mf, activation_mf = expert_gate_up(x_md, gate_up, weight_m, routes.ends_e)
    return gate_up_mf, expert_down(activation_mf, down, routes.ends_e)


def _forward_fp8(
    x_nd: Tensor, weight_m: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, top_k: int
) -> tuple[Tensor, Tensor]:
    # Each token once, and then its copies: half the bytes, and a word holds two numbers.
    x8_nd, undo_n = quantize_rows(x_nd)
    x8_md = spread_rows(x8_nd.view(torch.int16), routes.place_m, top_k).view(x8_nd.dtype)
    gate_up8, down8 = _quantize_weights(gate_up), _quantize_weights(down)
    undo_m = undo_n[routes.order_m // top_k]
    gate_up_mf, activation_mf = expert_gate_up_fp8(x8_md, undo_m, *gate_up8, weight_m, routes.ends_e)
    return gate_up_mf, expert_down_fp8(*quantize_rows(activation_mf), *down8, routes.ends_e)


def _quantize_weights(weights: Tensor) -> tuple[Tensor, Tensor]:
    small, undo_e = quantize_rows(weights.flatten(1))
    return small.view_as(weights), undo_e


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_nd: Tensor, weights_nk: Tensor, gate_up: Tensor, down: Tensor, fp8: bool, *routes: Tensor
    ) -> Tensor:
        places = Routes(*routes)
        ctx.top_k = top_k = weights_nk.shape[1]
        weight_m = weights_nk.flatten()[places.order_m]
        gate_up, down = gate_up.contiguous(), down.contiguous()
        forward = _forward_fp8 if fp8 else _forward
        gate_up_mf, out_md = forward(x_nd, weight_m, gate_up, down, places, top_k)
        ctx.save_for_backward(x_nd, weight_m, gate_up, down, gate_up_mf, *routes)
        out_nd: Tensor = sum_rows(out_md, places.place_m, top_k)
        return out_nd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_nd, weight_m, gate_up, down, gate_up_mf, _, place_m, ends_e = ctx.saved_tensors
        d_out_md = spread_rows(gradients[0].contiguous(), place_m, ctx.top_k)
        d_gate_up_mf, activation_mf, d_weight_m = expert_d_gate_up(d_out_md, down, gate_up_mf, weight_m, ends_e)
        # Frozen experts need no gradients.
        d_gate_up = d_down = None
        if ctx.needs_input_grad[3]:
            d_down = expert_outer(d_out_md, activation_mf, ends_e)
        del d_out_md, activation_mf
        if ctx.needs_input_grad[2]:
            d_gate_up = expert_outer(d_gate_up_mf, spread_rows(x_nd, place_m, ctx.top_k), ends_e)
        dx_md = expert_dx(d_gate_up_mf, gate_up, ends_e)
        d_weights_nk = d_weight_m[place_m].unflatten(0, (-1, ctx.top_k))
        return sum_rows(dx_md, place_m, ctx.top_k), d_weights_nk, d_gate_up, d_down, None, None, None, None


@torch.library.custom_op("keepstep::fp32_matmul", mutates_args=())
def fp32_matmul(left_mk: Tensor, right_kn: Tensor) -> Tensor:
    """left · right of bf16 matrices with fp32 sums and an fp32 result: no fp32 copies of them."""
    if left_mk.is_cuda and left_mk.dtype == torch.bfloat16:
        return torch.mm(left_mk, right_kn, out_dtype=torch.float32)
    return torch.mm(left_mk.float(), right_kn.float())


@fp32_matmul.register_fake
def _(left_mk: Tensor, right_kn: Tensor) -> Tensor:
    return left_mk.new_empty(left_mk.shape[0], right_kn.shape[1], dtype=torch.float32)


class _Fp32Linear(torch.autograd.Function):
    """The gradient, fp32 too, counts as two bf16 numbers: 16 bits of it."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight_ed: Tensor) -> Tensor:
        ctx.save_for_backward(x_nd, weight_ed)
        out_ne: Tensor = fp32_matmul(x_nd, weight_ed.t())
        return out_ne

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_nd, weight_ed = ctx.saved_tensors
        high_ne = gradients[0].to(x_nd.dtype)
        both = torch.cat([high_ne, (gradients[0] - high_ne).to(x_nd.dtype)], dim=1)
        d_high, d_low = fp32_matmul(both.t(), x_nd).chunk(2)
        return torch.mm(both, torch.cat([weight_ed, weight_ed])), (d_high + d_low).to(weight_ed.dtype)
