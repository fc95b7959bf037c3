"""The residual stream before a sub-block: add what the last one gave, and normalise, as one operator on a GPU.

Shape legend: b rows, t tokens, d hidden, m = b·t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.models.norm import RMSNorm
from keepstep.models.triton_found import has_triton


def add_and_norm(x_btd: Tensor, added_btd: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The stream with `added_btd`, and its norm."""
    # A norm that tensor parallelism changed reads its weight in a way of its own.
    if x_btd.is_cuda and type(norm) is RMSNorm:
        return joined_add_and_norm(x_btd, added_btd, norm.weight, norm.eps)
    stream_btd = x_btd if added_btd is None else x_btd + added_btd
    return stream_btd, norm(stream_btd)


def joined_add_and_norm(x_btd: Tensor, added_btd: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same for an RMS norm through the joined operators, on any device."""
    added_md = None if added_btd is None else added_btd.flatten(0, -2)
    both: tuple[Tensor, Tensor] = _AddAndNorm.apply(x_btd.flatten(0, -2), added_md, weight_d.to(x_btd.dtype), eps)  # type: ignore[no-untyped-call]
    return both[0].view_as(x_btd), both[1].view_as(x_btd)


class _AddAndNorm(torch.autograd.Function):
    """Hands the stream through, so that its backward pass meets both gradients and adds them on the way."""

    @staticmethod
    def forward(ctx: Any, x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if added_md is None:
            stream_md = x_md
            normed_md, inverses_m = rms_norm(x_md, weight_d, eps)
        else:
            stream_md, normed_md, inverses_m = add_rms_norm(x_md, added_md, weight_d, eps)
        ctx.save_for_backward(stream_md, inverses_m, weight_d)
        ctx.with_added = added_md is not None
        return stream_md, normed_md

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_stream_md, d_normed_md = gradients
        dx_md, d_weight = rms_norm_gradient(d_normed_md, d_stream_md, *ctx.saved_tensors)
        return dx_md, dx_md if ctx.with_added else None, d_weight, None


@torch.library.custom_op("keepstep::rms_norm", mutates_args=())
def rms_norm(x_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and the inverse root of each row's mean square."""
    return _forward(x_md, None, weight_d, eps)[1:]


@rms_norm.register_fake
def _(x_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(x_md), x_md.new_empty(x_md.shape[0], dtype=torch.float32)


@torch.library.custom_op("keepstep::add_rms_norm", mutates_args=())
def add_rms_norm(x_md: Tensor, added_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and the inverse root of each row's mean square."""
    return _forward(x_md, added_md, weight_d, eps)


@add_rms_norm.register_fake
def _(x_md: Tensor, added_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x_md), torch.empty_like(x_md), x_md.new_empty(x_md.shape[0], dtype=torch.float32)


@torch.library.custom_op("keepstep::rms_norm_gradient", mutates_args=())
def rms_norm_gradient(
    d_normed_md: Tensor, d_stream_md: Tensor, stream_md: Tensor, inverses_m: Tensor, weight_d: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the stream, with what reaches it past the norm, and of the weight."""
    if stream_md.is_cuda and has_triton():
        from keepstep.models.kernels.rmsnorm import rms_norm_backward

        return rms_norm_backward(d_normed_md.contiguous(), d_stream_md.contiguous(), stream_md, inverses_m, weight_d)
    unit = stream_md.float() * inverses_m[:, None]
    by_unit = d_normed_md.float() * weight_d.float()
    dx = inverses_m[:, None] * (by_unit - unit * (by_unit * unit).mean(1, keepdim=True))
    d_weight = (d_normed_md.float() * unit).sum(0)
    return (d_stream_md.float() + dx).to(stream_md.dtype), d_weight.to(weight_d.dtype)


@rms_norm_gradient.register_fake
def _(d_normed_md: Tensor, d_stream_md: Tensor, stream_md: Tensor, inverses_m: Tensor, weight_d: Tensor) -> Any:  # noqa: ARG001
    return torch.empty_like(stream_md), torch.empty_like(weight_d)


def _forward(x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if x_md.is_cuda and has_triton():
        from keepstep.models.kernels.rmsnorm import rms_norm_forward

        added_md = None if added_md is None else added_md.contiguous()
        return rms_norm_forward(x_md.contiguous(), added_md, weight_d, eps)
    stream_md = x_md if added_md is None else x_md + added_md
    inverses_m = torch.rsqrt(stream_md.float().square().mean(1) + eps)
    return stream_md, F.rms_norm(stream_md, weight_d.shape, weight_d, eps), inverses_m
