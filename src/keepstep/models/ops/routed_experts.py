"""The experts of all tokens as one autograd step: sort, grouped matmuls with SwiGLU between them, weighted sum.

A row is multiplied by the router's weight inside SwiGLU and not after the second matmul. So the outputs of experts need
not be saved. The backward pass sorts rows and computes SwiGLU again, so what is saved for each of a token's experts
is its gates and ups alone.

In fp8 all six matmuls take numbers of one byte: e4m3 for tokens, weights and the gradient of the output, the activation
of the forward pass too, e5m2 for the gradient of gates and ups and the activation of the backward pass. Tokens and rows
have a scale each, and so have the weights of each expert. Gradients pass the rounding as if nothing had been rounded
(straight-through).

Shape legend: n tokens, k experts of a token, m = n·k rows sorted by expert, r those rows with zeros after each
expert's, d hidden, e experts, f width of an expert; a trailing 8 is a tensor in fp8, and `undo` what its numbers are to
be multiplied by.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.models.ops.expert_matmuls import (
    expert_d_gate_up,
    expert_down,
    expert_dx,
    expert_gate_up,
    expert_gate_up_fp8,
    expert_matmul_fp8,
    expert_outer,
    expert_outer_fp8,
)
from keepstep.models.ops.expert_rows import quantize_rows, spread_rows, sum_rows
from keepstep.models.ops.experts_fp8 import runs_of, spread_transposed, swiglu_backward_fp8, transposed_weights

_TYPICAL = 2.0**34
"""Products of two sums of e4m3 numbers become numbers of e5m2 when they are divided by it.

A sum over some thousand inputs is typically 2^19: numbers that fill their format are about a quarter of its end, 448.
So typical products are 2^4, with room for 4000 times as much in e5m2, and for a 2^18th with all its digits.
"""
_LEAST = 1e-30
"""Of a scale: a row of zeros has one too."""


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
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Gates and ups, and the outputs of experts, both sorted by expert, and what else the backward pass needs."""
    x_md = spread_rows(x_nd, routes.place_m, top_k)
    gate_up_mf, activation_mf = expert_gate_up(x_md, gate_up, weight_m, routes.ends_e)
    return gate_up_mf, expert_down(activation_mf, down, routes.ends_e), ()


def _forward_fp8(
    x_nd: Tensor, weight_m: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, top_k: int
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    x8_nd, undo_n = quantize_rows(x_nd)
    gate_up8, down8 = _quantize_weights(gate_up), _quantize_weights(down)
    undo_m = undo_n[routes.order_m // top_k]
    x8_md = _spread_fp8(x8_nd, routes, top_k)
    gate_up_mf, activation_mf = expert_gate_up_fp8(x8_md, undo_m, *gate_up8, weight_m, routes.ends_e)
    out_md = expert_matmul_fp8(*quantize_rows(activation_mf), *down8, routes.ends_e)
    return gate_up_mf, out_md, (gate_up8[1], down8[1])


def _spread_fp8(source8_nd: Tensor, routes: Routes, top_k: int) -> Tensor:
    # Each token is quantized once, and then copied: half the bytes, and a word holds two numbers.
    words_md: Tensor = spread_rows(source8_nd.view(torch.int16), routes.place_m, top_k)
    return words_md.view(source8_nd.dtype)


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
        gate_up_mf, out_md, others = forward(x_nd, weight_m, gate_up, down, places, top_k)
        ctx.save_for_backward(x_nd, weight_m, gate_up, down, gate_up_mf, *routes, *others)
        out_nd: Tensor = sum_rows(out_md, places.place_m, top_k)
        return out_nd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_nd, weight_m, gate_up, down, gate_up_mf, order_m, place_m, ends_e, *undo = ctx.saved_tensors
        saved, routes = Saved(x_nd, weight_m, gate_up, down, gate_up_mf), Routes(order_m, place_m, ends_e)
        learned, d_out_nd = ctx.needs_input_grad[2:4], gradients[0].contiguous()
        backward = _backward_fp8 if undo else _backward
        dx_md, d_weight_m, *d_experts = backward(saved, routes, ctx.top_k, d_out_nd, learned, *undo)
        d_weights_nk = d_weight_m[place_m].unflatten(0, (-1, ctx.top_k))
        return sum_rows(dx_md, place_m, ctx.top_k), d_weights_nk, *d_experts, None, None, None, None


class Saved(NamedTuple):
    """What both backward passes need."""

    x_nd: Tensor
    weight_m: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_mf: Tensor


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Of sorted rows, of their weights, and of the experts' weights, which need none where they are frozen."""


def _backward(saved: Saved, routes: Routes, top_k: int, d_out_nd: Tensor, learned: tuple[bool, ...]) -> Gradients:
    x_nd, weight_m, gate_up, down, gate_up_mf = saved
    ends_e, d_gate_up, d_down = routes.ends_e, None, None
    d_out_md = spread_rows(d_out_nd, routes.place_m, top_k)
    d_gate_up_mf, activation_mf, d_weight_m = expert_d_gate_up(d_out_md, down, gate_up_mf, weight_m, ends_e)
    if learned[1]:
        d_down = expert_outer(d_out_md, activation_mf, ends_e)
    del d_out_md, activation_mf
    if learned[0]:
        d_gate_up = expert_outer(d_gate_up_mf, spread_rows(x_nd, routes.place_m, top_k), ends_e)
    return expert_dx(d_gate_up_mf, gate_up, ends_e), d_weight_m, d_gate_up, d_down


def _backward_fp8(
    saved: Saved, routes: Routes, top_k: int, d_out_nd: Tensor, learned: tuple[bool, ...], *undo: Tensor
) -> Gradients:
    x_nd, weight_m, gate_up, down, gate_up_mf = saved
    d_gate_up, d_down, token_m = None, None, routes.order_m // top_k
    (x8_nd, x_undo_n), (d_out8_nd, d_out_undo_n) = quantize_rows(x_nd), quantize_rows(d_out_nd)
    undo_m = x_undo_n[token_m], d_out_undo_n[token_m]
    d_out8_md, down8 = _spread_fp8(d_out8_nd, routes, top_k), transposed_weights(down, undo[1])
    dy_mf = expert_matmul_fp8(d_out8_md, undo_m[1], down8, undo[1], routes.ends_e)
    del d_out8_md, down8
    dx_undo_m, factors, outer_undo = _scales(weight_m, *undo_m, *(each.amax() for each in undo))
    runs = runs_of(routes.ends_e, len(weight_m))
    d_gate_up8_mf, d_gate_up8_fr, activation8_fr, d_weight_m = swiglu_backward_fp8(
        dy_mf, gate_up_mf, [weight_m, *factors], *runs, any(learned)
    )
    del dy_mf
    if learned[1]:
        d_out8_dr = spread_transposed(d_out8_nd, routes.order_m, *runs, top_k)
        d_down = expert_outer_fp8(d_out8_dr, activation8_fr, outer_undo[1], *runs)
        del d_out8_dr
    del activation8_fr
    if learned[0]:
        x8_dr = spread_transposed(x8_nd, routes.order_m, *runs, top_k)
        d_gate_up = expert_outer_fp8(d_gate_up8_fr, x8_dr, outer_undo[0], *runs)
        del x8_dr
    del d_gate_up8_fr
    gate_up8 = transposed_weights(gate_up, undo[0])
    dx_md = expert_matmul_fp8(d_gate_up8_mf, dx_undo_m, gate_up8, undo[0], routes.ends_e)
    return dx_md, d_weight_m, d_gate_up, d_down


def _scales(
    weight_m: Tensor, x_undo_m: Tensor, d_out_undo_m: Tensor, gate_up_undo: Tensor, down_undo: Tensor
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Scales of e5m2 numbers from those of what they are made of: its range is so wide that nothing must be measured.

    First what undoes the scale of each row of the gradient of gates and ups. Then what each row is multiplied by: of
    that gradient, straight and transposed, and of the activation. The transposed ones take up the scales of the e4m3
    numbers that they meet, which change along what is summed over. Last what undoes the scales of both sums.
    """
    scale_m = weight_m.abs() * d_out_undo_m * x_undo_m * _TYPICAL
    dx_undo_m = (scale_m * (gate_up_undo * down_undo)).clamp(min=_LEAST)
    largest = [_largest(dx_undo_m * x_undo_m), _largest(scale_m * x_undo_m) * gate_up_undo.square()]
    left_undo, right_undo = (each.clamp(min=_LEAST) for each in largest)
    return dx_undo_m, (1 / dx_undo_m, x_undo_m / left_undo, d_out_undo_m / right_undo), (left_undo, right_undo)


def _largest(scale_m: Tensor) -> Tensor:
    return scale_m.amax() if len(scale_m) else scale_m.new_zeros(())


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
