"""The product that ends a sub-block: the residual stream added inside it, and its gradient left to what comes before.

Apart, the sum is two more passes over the stream. cuBLASLt adds a matrix on the way out of a product, in fp32 and
before the only rounding; torch's addmm does so as well, but copies the matrix first.

Shape legend: b rows, t tokens, k inputs of the product, d hidden, m = b·t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.products import multiply_and_add


def add_product(left_btk: Tensor, weight_dk: Tensor, residual_btd: Tensor) -> Tensor:
    """residual + left · weightᵀ."""
    stream_md: Tensor = _AddProduct.apply(left_btk.flatten(0, -2), weight_dk, residual_btd.flatten(0, -2))  # type: ignore[no-untyped-call]
    return stream_md.view_as(residual_btd)


class _AddProduct(torch.autograd.Function):
    """The sum's gradient goes both ways unchanged."""

    @staticmethod
    def forward(ctx: Any, left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:
        ctx.save_for_backward(left_mk if ctx.needs_input_grad[1] else None, weight_dk)
        stream_md: Tensor = added_product(left_mk, weight_dk, residual_md)
        return stream_md

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        left_mk, weight_dk = ctx.saved_tensors
        (d_stream_md,) = gradients
        by_left, by_weight, _ = ctx.needs_input_grad
        return (
            torch.mm(d_stream_md, weight_dk) if by_left else None,
            torch.mm(d_stream_md.t(), left_mk) if by_weight else None,
            d_stream_md,
        )


def output_token(x_mk: Tensor, weight_dk: Tensor) -> Tensor:
    """What stands for an output [m, d] before it is computed; it has no numbers of its own."""
    return x_mk.new_empty(()).expand(x_mk.shape[0], weight_dk.shape[0])


def last_product(
    token_md: Tensor, left_mk: Tensor, weight_dk: Tensor, bias_d: Tensor | None, residual_md: Tensor | None
) -> Tensor:
    """left · weightᵀ with a bias or a residual, for a step before it that computes its gradients together with its own.

    `token_md` comes from that step and gets this output's gradient. Nothing is kept for the backward pass, so that full
    recomputation ends before this product.
    """
    output_md: Tensor = _LastProduct.apply(token_md, left_mk, weight_dk.detach(), bias_d, residual_md)  # type: ignore[no-untyped-call]
    return output_md


class _LastProduct(torch.autograd.Function):
    """Hands its gradient to the token."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 - nothing is kept
        token_md: Tensor,  # noqa: ARG004 - stands for the output
        left_mk: Tensor,
        weight_dk: Tensor,
        bias_d: Tensor | None,
        residual_md: Tensor | None,
    ) -> Tensor:
        if residual_md is None:
            return F.linear(left_mk, weight_dk, bias_d)
        stream_md: Tensor = added_product(left_mk, weight_dk, residual_md)
        return stream_md

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (d_out_md,) = gradients
        *_, by_bias, by_residual = ctx.needs_input_grad
        return d_out_md, None, None, d_out_md.sum(0) if by_bias else None, d_out_md if by_residual else None


@torch.library.custom_op("keepstep::added_product", mutates_args=())
def added_product(left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:
    """residual + left · weightᵀ."""
    return multiply_and_add(left_mk, weight_dk.t(), residual_md)


@added_product.register_fake
def _(left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(residual_md)
