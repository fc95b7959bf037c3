"""The experts of all tokens as one autograd step: gather, grouped matmuls with SwiGLU between them, weighted sum.

A row is multiplied by the router's weight inside SwiGLU and not after the second matmul. So the outputs of experts need
not be saved. The backward pass gathers rows and computes SwiGLU again, so what is saved for each of a token's experts
is its gates and ups alone.

Shape legend: n tokens, k experts of a token, m = n·k rows sorted by expert, d hidden, e experts, f width of an expert.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import CudaError, relative_difference, works
from keepstep.models.ops.backend import backend, has_triton
from keepstep.models.ops.grouped_matmul import grouped_matmul, grouped_matmul_transposed, grouped_outer


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


def routed_experts(x_nd: Tensor, weights_nk: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> Tensor:
    """The weighted sum of the outputs of each token's experts, [n, d]."""
    out_nd: Tensor = _RoutedExperts.apply(x_nd, weights_nk, gate_up, down, *routes)  # type: ignore[no-untyped-call]
    return out_nd


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weights_nk: Tensor, gate_up: Tensor, down: Tensor, *routes: Tensor) -> Tensor:
        order_m, place_m, ends_e = routes
        ctx.top_k = top_k = weights_nk.shape[1]
        ctx.has_kernel = has_kernel = backend().has_grouped_matmul(x_nd)
        weight_m = weights_nk.flatten()[order_m]
        sorted_md = gather_rows(x_nd, order_m // top_k)
        gate_up_mf = grouped_matmul(sorted_md, gate_up, ends_e, has_kernel=has_kernel)
        del sorted_md
        activation_mf = weighted_swiglu(gate_up_mf, weight_m)
        out_md = grouped_matmul(activation_mf, down, ends_e, has_kernel=has_kernel)
        ctx.save_for_backward(x_nd, weight_m, gate_up, down, gate_up_mf, *routes)
        out_nd: Tensor = sum_rows(out_md, place_m, top_k)
        return out_nd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_nd, weight_m, gate_up, down, gate_up_mf, order_m, place_m, ends_e = ctx.saved_tensors
        token_m = order_m // ctx.top_k
        d_out_md = gather_rows(gradients[0].contiguous(), token_m)
        d_activation_mf = grouped_matmul_transposed(d_out_md, down, ends_e, has_kernel=ctx.has_kernel)
        d_gate_up_mf, activation_mf, d_weight_m = weighted_swiglu_backward(d_activation_mf, gate_up_mf, weight_m)
        # Frozen experts need no gradients.
        d_gate_up = d_down = None
        if ctx.needs_input_grad[3]:
            d_down = grouped_outer(d_out_md, activation_mf, ends_e, has_kernel=ctx.has_kernel)
        del d_out_md, d_activation_mf, activation_mf
        if ctx.needs_input_grad[2]:
            d_gate_up = grouped_outer(d_gate_up_mf, gather_rows(x_nd, token_m), ends_e, has_kernel=ctx.has_kernel)
        dx_md = grouped_matmul_transposed(d_gate_up_mf, gate_up, ends_e, has_kernel=ctx.has_kernel)
        d_weights_nk = d_weight_m[place_m].unflatten(0, (-1, ctx.top_k))
        return sum_rows(dx_md, place_m, ctx.top_k), d_weights_nk, d_gate_up, d_down, None, None, None


@torch.library.custom_op("keepstep::gather_rows", mutates_args=())
def gather_rows(source_nd: Tensor, index_m: Tensor) -> Tensor:
    """Rows `index_m` of a matrix."""
    if _has_kernels(source_nd):
        from keepstep.models.kernels import experts

        return experts.gather_rows(source_nd.contiguous(), index_m)
    return source_nd.index_select(0, index_m)


@gather_rows.register_fake
def _(source_nd: Tensor, index_m: Tensor) -> Tensor:
    return source_nd.new_empty(index_m.shape[0], source_nd.shape[1])


@torch.library.custom_op("keepstep::sum_rows", mutates_args=())
def sum_rows(source_md: Tensor, place_m: Tensor, copies: int) -> Tensor:
    """Row i is the sum of the rows `place_m[i·copies : (i + 1)·copies]`, in that order, [m / copies, d]."""
    if _has_kernels(source_md):
        from keepstep.models.kernels import experts

        return experts.sum_rows(source_md.contiguous(), place_m, copies)
    each: Tensor = source_md.index_select(0, place_m).unflatten(0, (-1, copies))
    return each.sum(1)


@sum_rows.register_fake
def _(source_md: Tensor, place_m: Tensor, copies: int) -> Tensor:
    return source_md.new_empty(place_m.shape[0] // copies, source_md.shape[1])


@torch.library.custom_op("keepstep::weighted_swiglu", mutates_args=())
def weighted_swiglu(gate_up_mf: Tensor, weight_m: Tensor) -> Tensor:
    """silu(gate) × up × weight of [m, 2f], first the gates."""
    if _has_kernels(gate_up_mf):
        from keepstep.models.kernels import experts

        return experts.weighted_swiglu(gate_up_mf, weight_m)
    gate_mf, up_mf = gate_up_mf.float().chunk(2, dim=1)
    return (F.silu(gate_mf) * up_mf * weight_m[:, None]).to(gate_up_mf.dtype)


@weighted_swiglu.register_fake
def _(gate_up_mf: Tensor, weight_m: Tensor) -> Tensor:  # noqa: ARG001 - the operator's own signature
    return gate_up_mf.new_empty(gate_up_mf.shape[0], gate_up_mf.shape[1] // 2)


@torch.library.custom_op("keepstep::weighted_swiglu_backward", mutates_args=())
def weighted_swiglu_backward(
    gradient_mf: Tensor, gate_up_mf: Tensor, weight_m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the gates and ups, the activation itself, and the gradient of the weights."""
    if _has_kernels(gate_up_mf):
        from keepstep.models.kernels import experts

        return experts.weighted_swiglu_backward(gradient_mf.contiguous(), gate_up_mf, weight_m)
    gate_mf, up_mf = gate_up_mf.float().chunk(2, dim=1)
    sigmoid_mf, scale_m1 = torch.sigmoid(gate_mf), weight_m[:, None]
    product_mf, dy_mf = gate_mf * sigmoid_mf * up_mf, gradient_mf.float() * scale_m1
    d_gate_mf = dy_mf * up_mf * sigmoid_mf * (1 + gate_mf * (1 - sigmoid_mf))
    d_gate_up_mf = torch.cat([d_gate_mf, dy_mf * gate_mf * sigmoid_mf], dim=1).to(gate_up_mf.dtype)
    d_weight_m = (gradient_mf.float() * product_mf).sum(1)
    return d_gate_up_mf, (product_mf * scale_m1).to(gate_up_mf.dtype), d_weight_m


@weighted_swiglu_backward.register_fake
def _(gradient_mf: Tensor, gate_up_mf: Tensor, weight_m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate_up_mf), torch.empty_like(gradient_mf), torch.empty_like(weight_m)


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


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton() and works("experts", tensor.device, _prove)


def _prove(device: torch.device) -> float:
    from keepstep.models.kernels import experts

    generator = torch.Generator().manual_seed(0)
    sizes = (40, 96), (40, 192), (40, 1)
    gradient, gate_up, weight = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    weight, order = weight.flatten().float(), torch.randperm(40, generator=generator)

    def results(module: Any, where: torch.device) -> list[Tensor]:
        d, g, w, o = (tensor.to(where) for tensor in (gradient, gate_up, weight, order))
        backward = module.weighted_swiglu_backward(d, g, w)
        rows = module.gather_rows(g, o // 4), module.sum_rows(g, o, 4)
        return [part.cpu() for part in (*rows, module.weighted_swiglu(g, w), *backward)]

    try:
        ours = results(experts, device)
    except Exception as error:  # whatever a compiler that we have never tested may raise
        raise CudaError(str(error)) from error
    return relative_difference(ours, results(sys.modules[__name__], torch.device("cpu")))
