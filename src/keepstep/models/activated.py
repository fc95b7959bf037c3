"""A plain feed-forward as one step of differentiation: two products, and GELU inside both of them.

Taken apart, GELU is a pass of its own over the widest tensors of the model, and so is its backward. On Hopper GPUs
both happen inside the products, behind their sums (`kernels/activated.cu`); elsewhere beside them.

Shape legend: b rows, t tokens, m = b·t, k hidden, f feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.models.added import last_product, output_token
from keepstep.models.kernels.activated import activated_backward, activated_forward, joins


def activated(x_btk: Tensor, up: nn.Linear, down: nn.Linear, by_tanh: bool, residual_btk: Tensor | None) -> Tensor:
    """down(gelu(up(x))), and a residual where one is given, which only a product without a bias takes."""
    parts: list[Tensor | None] = [up.weight, up.bias, down.weight, down.bias]
    up_fk, up_bias_f, down_kf, down_bias_k = (None if part is None else part.to(x_btk.dtype) for part in parts)
    assert down_kf is not None
    residual_mk = None if residual_btk is None else residual_btk.flatten(0, -2)
    token_mk, activation_mf = _Activated.apply(x_btk.flatten(0, -2), up_fk, up_bias_f, down_kf, by_tanh)  # type: ignore[no-untyped-call]
    return last_product(token_mk, activation_mf, down_kf, down_bias_k, residual_mk).view_as(x_btk)


class _Activated(torch.autograd.Function):
    """Has the gradients of both products, because GELU's backward is part of the second one's."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, up_fk: Tensor, up_bias_f: Tensor | None, down_kf: Tensor, by_tanh: bool
    ) -> tuple[Tensor, Tensor]:
        activation_mf, kept_mf = activated_product(x_mk, up_fk, up_bias_f, by_tanh)
        # Frozen weights have no gradient to keep inputs for.
        _, by_up, _, by_down, _ = ctx.needs_input_grad
        left_mk, right_mf = x_mk if by_up else None, activation_mf if by_down else None
        ctx.save_for_backward(left_mk, up_fk, down_kf, right_mf, kept_mf)
        ctx.by_tanh = by_tanh
        ctx.mark_non_differentiable(activation_mf)
        return output_token(x_mk, down_kf), activation_mf

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_mk, up_fk, down_kf, activation_mf, kept_mf = ctx.saved_tensors
        d_out_mk = gradients[0]
        by_x, by_up, by_up_bias, by_down, _ = ctx.needs_input_grad
        d_wide_mf = activated_gradient(d_out_mk, down_kf, kept_mf, ctx.by_tanh)
        return (
            torch.mm(d_wide_mf, up_fk) if by_x else None,
            torch.mm(d_wide_mf.t(), x_mk) if by_up else None,
            d_wide_mf.sum(0) if by_up_bias else None,
            torch.mm(d_out_mk.t(), activation_mf) if by_down else None,
            None,
        )


@torch.library.custom_op("keepstep::activated_product", mutates_args=())
def activated_product(x_mk: Tensor, up_fk: Tensor, bias_f: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:
    """GELU of x · upᵀ + bias, and what its gradient takes: slopes from the kernel, else that product."""
    if x_mk.is_cuda and joins(x_mk, up_fk.shape[0]):
        return activated_forward(x_mk.contiguous(), up_fk.contiguous(), bias_f, by_tanh)
    wide_mf = F.linear(x_mk, up_fk, bias_f)
    return F.gelu(wide_mf, approximate=_name(by_tanh)), wide_mf


@activated_product.register_fake
def _(x_mk: Tensor, up_fk: Tensor, bias_f: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = x_mk.shape[0], up_fk.shape[0]
    return x_mk.new_empty(shape), x_mk.new_empty(shape)


@torch.library.custom_op("keepstep::activated_gradient", mutates_args=())
def activated_gradient(d_out_mk: Tensor, down_kf: Tensor, kept_mf: Tensor, by_tanh: bool) -> Tensor:
    """The gradient of x · upᵀ + bias, from that of the whole feed-forward and what `activated_product` kept."""
    if d_out_mk.is_cuda and joins(d_out_mk, down_kf.shape[1]):
        return activated_backward(d_out_mk.contiguous(), down_kf.contiguous(), kept_mf)
    dy_mf = torch.mm(d_out_mk, down_kf)
    gradient: Tensor = torch.ops.aten.gelu_backward(dy_mf, kept_mf, approximate=_name(by_tanh))
    return gradient


@activated_gradient.register_fake
def _(d_out_mk: Tensor, down_kf: Tensor, kept_mf: Tensor, by_tanh: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(kept_mf)


def _name(by_tanh: bool) -> str:
    return "tanh" if by_tanh else "none"
