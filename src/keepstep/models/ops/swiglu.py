"""SwiGLU as one operator: a kernel where there is one, torch's own operators elsewhere.

Shape legend: m tokens, f feed-forward width; a fused input [m, 2f] holds blocks of `width` gates, then their ups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import difference
from keepstep.models.ops.backend import proven


def activate(fused: Tensor, width: int) -> Tensor:
    """silu(gate) × up."""
    if proven("swiglu", fused, _prove):
        from keepstep.models.kernels.block import swiglu_forward

        return swiglu_forward(fused.contiguous(), width)
    return _by_torch(fused, width)


def _by_torch(fused: Tensor, width: int) -> Tensor:
    return swiglu_by_torch(fused, width).to(fused.dtype)


def swiglu_by_torch(fused: Tensor, width: int) -> Tensor:
    """silu(gate) × up in fp32."""
    gate, up = fused.float().unflatten(-1, (-1, 2, width)).unbind(-2)
    product: Tensor = (F.silu(gate) * up).flatten(-2)
    return product


def activate_backward(gradient: Tensor, fused: Tensor, width: int) -> Tensor:
    """The gradient of the fused input."""
    if proven("swiglu", fused, _prove):
        from keepstep.models.kernels.block import swiglu_backward

        return swiglu_backward(gradient.contiguous(), fused, width)
    return _backward_by_torch(gradient, fused, width)


def _backward_by_torch(gradient: Tensor, fused: Tensor, width: int) -> Tensor:
    return swiglu_backward_by_torch(gradient, fused, width).to(fused.dtype)


def swiglu_backward_by_torch(gradient: Tensor, fused: Tensor, width: int) -> Tensor:
    """The gradient of the fused input in fp32."""
    gate, up = fused.float().unflatten(-1, (-1, 2, width)).unbind(-2)
    dy = gradient.float().unflatten(-1, (-1, width))
    sigmoid = torch.sigmoid(gate)
    d_gate, d_up = dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid
    return torch.stack([d_gate, d_up], dim=-2).flatten(-3)


@torch.library.custom_op("keepstep::swiglu", mutates_args=())
def swiglu(fused_mf: Tensor, width: int) -> Tensor:
    """silu(gate) × up."""
    return activate(fused_mf, width)


@swiglu.register_fake
def _(fused_mf: Tensor, width: int) -> Tensor:  # noqa: ARG001 - the operator's own signature
    return fused_mf.new_empty(*fused_mf.shape[:-1], fused_mf.shape[-1] // 2)


@torch.library.custom_op("keepstep::swiglu_backward", mutates_args=())
def swiglu_gradient(gradient_mf: Tensor, fused_mf: Tensor, width: int) -> Tensor:
    """The gradient of the fused input."""
    return activate_backward(gradient_mf, fused_mf, width)


@swiglu_gradient.register_fake
def _(gradient_mf: Tensor, fused_mf: Tensor, width: int) -> Tensor:  # noqa: ARG001 - the operator's own signature
    return torch.empty_like(fused_mf)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the names torch calls it with
    fused_mf, ctx.width = inputs
    ctx.save_for_backward(fused_mf)


def _backward(ctx: Any, gradient_mf: Tensor) -> tuple[Tensor, None]:
    return swiglu_gradient(gradient_mf, ctx.saved_tensors[0], ctx.width), None


swiglu.register_autograd(_backward, setup_context=_keep)


def _prove(device: torch.device) -> float:
    from keepstep.models.kernels.block import swiglu_backward, swiglu_forward

    generator = torch.Generator().manual_seed(1)
    # Widths below, at and above what a program works on.
    pairs = [torch.randn(2, 6, 4 * width, generator=generator).bfloat16() for width in (24, 1024, 1100)]

    def results(form: Any, where: torch.device) -> list[Tensor]:
        forward, backward = form
        sides = [(*pair.to(where), pair.shape[-1] // 4) for pair in pairs]
        outputs = [forward(fused, width) for fused, _, width in sides]
        return outputs + [backward(dy[:, : 2 * width].contiguous(), fused, width) for fused, dy, width in sides]

    return difference(results, (swiglu_forward, swiglu_backward), (_by_torch, _backward_by_torch), device)
