"""A feed-forward as one autograd step: two matmuls with SwiGLU or GELU fused into their epilogues.

As a separate operator, the activation is a pass over the widest tensors of the model, and so is its backward. On Hopper
GPUs both run in the matmuls' epilogues (`kernels/gemm_tiles.py`); elsewhere they are operators of their own.

Shape legend: b rows, t tokens, m = b·t, k hidden, f feed-forward width, n rows of the first matmul: f with GELU, 2·f
gates and ups with SwiGLU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.models.kernels.gemm_tiles import (
    can_fuse_gelu,
    can_fuse_swiglu,
    gelu_gemm_backward,
    gelu_gemm_forward,
    swiglu_gemm_backward,
    swiglu_gemm_forward,
)
from keepstep.models.ops.matmul import grad_placeholder, output_matmul
from keepstep.models.ops.swiglu import activate, activate_backward


def swiglu_mlp(
    x_btk: Tensor, gate_up_nk: Tensor, down_kf: Tensor, width: int, residual_btk: Tensor | None = None
) -> Tensor:
    """down · (silu(gate) × up), plus a residual where one is given; gates and ups come in blocks of `width`."""
    return _feed_forward(x_btk, (gate_up_nk, None, down_kf, None), residual_btk, width, False)


def gelu_mlp(x_btk: Tensor, up: nn.Linear, down: nn.Linear, by_tanh: bool, residual_btk: Tensor | None) -> Tensor:
    """down(gelu(up(x))), plus a residual where one is given, which needs a last matmul without a bias."""
    parts: list[Tensor | None] = [up.weight, up.bias, down.weight, down.bias]
    weights = [None if part is None else part.to(x_btk.dtype) for part in parts]
    return _feed_forward(x_btk, weights, residual_btk, 0, by_tanh)


def _feed_forward(x_btk: Tensor, weights: Any, residual_btk: Tensor | None, width: int, by_tanh: bool) -> Tensor:
    up_nk, up_bias_n, down_kf, down_bias_k = weights
    residual_mk = None if residual_btk is None else residual_btk.flatten(0, -2)
    placeholder_mk, activation_mf = _FusedMlp.apply(x_btk.flatten(0, -2), up_nk, up_bias_n, down_kf, width, by_tanh)  # type: ignore[no-untyped-call]
    return output_matmul(placeholder_mk, activation_mf, down_kf, down_bias_k, residual_mk).view_as(x_btk)


class _FusedMlp(torch.autograd.Function):
    """Computes the gradients of both matmuls, because the activation's backward is an epilogue of the second one's.

    The activation is SwiGLU in blocks of `width`, or GELU where that is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, up_nk: Tensor, up_bias_n: Tensor | None, down_kf: Tensor, width: int, by_tanh: bool
    ) -> tuple[Tensor, Tensor]:
        if width:
            activation_mf, saved_mn = swiglu_mlp_forward(x_mk, up_nk, width)
        else:
            activation_mf, saved_mn = gelu_mlp_forward(x_mk, up_nk, up_bias_n, by_tanh)
        # Frozen weights need no inputs saved for their gradients.
        _, by_up, _, by_down, *_ = ctx.needs_input_grad
        left_mk, right_mf = x_mk if by_up else None, activation_mf if by_down else None
        ctx.save_for_backward(left_mk, up_nk, down_kf, right_mf, saved_mn)
        ctx.width, ctx.by_tanh = width, by_tanh
        ctx.mark_non_differentiable(activation_mf)
        return grad_placeholder(x_mk, down_kf), activation_mf

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_mk, up_nk, down_kf, activation_mf, saved_mn = ctx.saved_tensors
        d_out_mk = gradients[0]
        by_x, by_up, by_up_bias, by_down, *_ = ctx.needs_input_grad
        if ctx.width:
            d_wide_mn = swiglu_mlp_backward(d_out_mk, down_kf, saved_mn, ctx.width)
        else:
            d_wide_mn = gelu_mlp_backward(d_out_mk, down_kf, saved_mn, ctx.by_tanh)
        return (
            torch.mm(d_wide_mn, up_nk) if by_x else None,
            torch.mm(d_wide_mn.t(), x_mk) if by_up else None,
            d_wide_mn.sum(0) if by_up_bias else None,
            torch.mm(d_out_mk.t(), activation_mf) if by_down else None,
            None,
            None,
        )


@torch.library.custom_op("keepstep::swiglu_mlp_forward", mutates_args=())
def swiglu_mlp_forward(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of x · gate_upᵀ, and what backward needs: the kernel's local gradients, else the matmul."""
    if x_mk.is_cuda and can_fuse_swiglu(x_mk, gate_up_nk.shape[0] // 2, width):
        return swiglu_gemm_forward(x_mk.contiguous(), gate_up_nk.contiguous(), width)
    gate_up_mn = torch.mm(x_mk, gate_up_nk.t())
    return activate(gate_up_mn, width), gate_up_mn


@swiglu_mlp_forward.register_fake
def _(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    m, n = x_mk.shape[0], gate_up_nk.shape[0]
    return x_mk.new_empty((m, n // 2)), x_mk.new_empty((m, n))


@torch.library.custom_op("keepstep::swiglu_mlp_backward", mutates_args=())
def swiglu_mlp_backward(d_out_mk: Tensor, down_kf: Tensor, saved_mn: Tensor, width: int) -> Tensor:
    """The gradient of x · gate_upᵀ, from that of the whole feed-forward and what `swiglu_mlp_forward` saved."""
    if d_out_mk.is_cuda and can_fuse_swiglu(d_out_mk, down_kf.shape[1], width):
        return swiglu_gemm_backward(d_out_mk.contiguous(), down_kf.contiguous(), saved_mn, width)
    return activate_backward(torch.mm(d_out_mk, down_kf), saved_mn, width)


@swiglu_mlp_backward.register_fake
def _(d_out_mk: Tensor, down_kf: Tensor, saved_mn: Tensor, width: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(saved_mn)


@torch.library.custom_op("keepstep::gelu_mlp_forward", mutates_args=())
def gelu_mlp_forward(x_mk: Tensor, up_fk: Tensor, bias_f: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:
    """GELU of x · upᵀ + bias, and what the backward pass needs: the kernel's local gradients, else the matmul."""
    if x_mk.is_cuda and can_fuse_gelu(x_mk, up_fk.shape[0]):
        return gelu_gemm_forward(x_mk.contiguous(), up_fk.contiguous(), bias_f, by_tanh)
    wide_mf = F.linear(x_mk, up_fk, bias_f)
    return F.gelu(wide_mf, approximate=_name(by_tanh)), wide_mf


@gelu_mlp_forward.register_fake
def _(x_mk: Tensor, up_fk: Tensor, bias_f: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = x_mk.shape[0], up_fk.shape[0]
    return x_mk.new_empty(shape), x_mk.new_empty(shape)


@torch.library.custom_op("keepstep::gelu_mlp_backward", mutates_args=())
def gelu_mlp_backward(d_out_mk: Tensor, down_kf: Tensor, saved_mf: Tensor, by_tanh: bool) -> Tensor:
    """The gradient of x · upᵀ + bias, from that of the whole feed-forward and what `gelu_mlp_forward` saved."""
    if d_out_mk.is_cuda and can_fuse_gelu(d_out_mk, down_kf.shape[1]):
        return gelu_gemm_backward(d_out_mk.contiguous(), down_kf.contiguous(), saved_mf)
    dy_mf = torch.mm(d_out_mk, down_kf)
    gradient: Tensor = torch.ops.aten.gelu_backward(dy_mf, saved_mf, approximate=_name(by_tanh))
    return gradient


@gelu_mlp_backward.register_fake
def _(d_out_mk: Tensor, down_kf: Tensor, saved_mf: Tensor, by_tanh: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(saved_mf)


def _name(by_tanh: bool) -> str:
    return "tanh" if by_tanh else "none"
