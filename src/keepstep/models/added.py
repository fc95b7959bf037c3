"""The residual stream added inside the product that ends a sub-block, as one step of differentiation.

Apart, the sum is two more passes over the stream. cuBLASLt adds a matrix on the way out of a product, in fp32 and
before the only rounding; torch's addmm does so as well, but copies the matrix first.

Shape legend: b rows, t tokens, k inputs of the product, d hidden, m = b·t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


@torch.library.custom_op("keepstep::added_product", mutates_args=())
def added_product(left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:
    """residual + left · weightᵀ."""
    return multiply_and_add(left_mk, weight_dk.t(), residual_md)


@added_product.register_fake
def _(left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(residual_md)
