"""A gated feed-forward without biases as one step of differentiation: two products, and SwiGLU inside both of them.

Taken apart, silu(gate) × up is a pass of its own over the widest tensors of the model, and so is its backward. On
Hopper GPUs both happen inside the products, behind their sums (`kernels/gated.cu`); elsewhere beside them.

Shape legend: m tokens, k hidden, f feed-forward width, n = 2·f rows of the fused gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepstep.models.added import last_product, output_token
from keepstep.models.kernels.gated import gated_backward, gated_forward, joins
from keepstep.models.swiglu import activate, activate_backward


def gated(x_btk: Tensor, gate_up_nk: Tensor, down_kf: Tensor, width: int, residual_btk: Tensor | None = None) -> Tensor:
    """down · (silu(gate) × up) of blocks of `width` gates and ups, and a residual where one is given."""
    residual_mk = None if residual_btk is None else residual_btk.flatten(0, -2)
    token_mk, product_mf = _Gated.apply(x_btk.flatten(0, -2), gate_up_nk, down_kf, width)  # type: ignore[no-untyped-call]
    return last_product(token_mk, product_mf, down_kf, None, residual_mk).view_as(x_btk)


class _Gated(torch.autograd.Function):
    """Has the gradients of both products, because the activation's backward is part of the second one's."""

    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, gate_up_nk: Tensor, down_kf: Tensor, width: int) -> tuple[Tensor, Tensor]:
        product_mf, kept_mn = gated_product(x_mk, gate_up_nk, width)
        # Frozen weights have no gradient to keep inputs for.
        by_gate_up, by_down = ctx.needs_input_grad[1:3]
        left_mk, right_mf = x_mk if by_gate_up else None, product_mf if by_down else None
        ctx.save_for_backward(left_mk, gate_up_nk, down_kf, right_mf, kept_mn)
        ctx.width = width
        ctx.mark_non_differentiable(product_mf)
        return output_token(x_mk, down_kf), product_mf

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_mk, gate_up_nk, down_kf, product_mf, kept_mn = ctx.saved_tensors
        d_out_mk = gradients[0]
        by_x, by_gate_up, by_down = ctx.needs_input_grad[:3]
        d_fused_mn = gated_gradient(d_out_mk, down_kf, kept_mn, ctx.width)
        return (
            torch.mm(d_fused_mn, gate_up_nk) if by_x else None,
            torch.mm(d_fused_mn.t(), x_mk) if by_gate_up else None,
            torch.mm(d_out_mk.t(), product_mf) if by_down else None,
            None,
        )


@torch.library.custom_op("keepstep::gated_product", mutates_args=())
def gated_product(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of x · gate_upᵀ, and what its gradient takes: slopes from the kernel, else that product."""
    if x_mk.is_cuda and joins(x_mk, gate_up_nk.shape[0] // 2, width):
        return gated_forward(x_mk.contiguous(), gate_up_nk.contiguous(), width)
    fused_mn = torch.mm(x_mk, gate_up_nk.t())
    return activate(fused_mn, width)[0], fused_mn


@gated_product.register_fake
def _(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    m, n = x_mk.shape[0], gate_up_nk.shape[0]
    return x_mk.new_empty((m, n // 2)), x_mk.new_empty((m, n))


@torch.library.custom_op("keepstep::gated_gradient", mutates_args=())
def gated_gradient(d_out_mk: Tensor, down_kf: Tensor, kept_mn: Tensor, width: int) -> Tensor:
    """The gradient of x · gate_upᵀ, from that of the whole feed-forward and what `gated_product` kept."""
    if d_out_mk.is_cuda and joins(d_out_mk, down_kf.shape[1], width):
        return gated_backward(d_out_mk.contiguous(), down_kf.contiguous(), kept_mn, width)
    return activate_backward(torch.mm(d_out_mk, down_kf), kept_mn, width)[0]


@gated_gradient.register_fake
def _(d_out_mk: Tensor, down_kf: Tensor, kept_mn: Tensor, width: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(kept_mn)
