"""Normalisation, and the residual stream before a sub-block: add the last one's output and normalise.

Both kinds of norm compute in fp32 inside torch's kernels and return the precision of their input. On a GPU the sum and
an RMS norm are one operator.

Shape legend: b rows, t tokens, d hidden, m = b·t.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.kernels.cuda import difference
from keepstep.models.ops.backend import backend, proven
from keepstep.models.ops.fp8 import Fp8Rows, fp8_normed, placeholder


class LayerNorm(nn.Module):
    """Mean zero, variance one, times a weight, plus a bias where there is one."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square one, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return backend().rms_norm(x, self.weight.to(x.dtype), self.eps)


class RMSNorm1p(RMSNorm):
    """Root mean square one, times 1 + weight, which is added and multiplied in fp32; the weight starts at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return backend().rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm of the residual stream or of what is added to it."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden, config.norm_eps, config.bias)
    return make_rms_norm(config, config.hidden)


def make_rms_norm(config: ModelConfig, size: int) -> RMSNorm:
    """An RMS norm of `size` channels, with weights as `model.norm` has them."""
    return (RMSNorm1p if config.norm == "rmsnorm_1p" else RMSNorm)(size, config.norm_eps)


def add_norm(x_btd: Tensor, added_btd: Tensor | None, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """The stream plus `added_btd`, and its norm; without one the stream twice."""
    if is_fused(norm, x_btd):
        return fused_add_norm(x_btd, added_btd, norm.weight, norm.eps)
    stream_btd = x_btd if added_btd is None else x_btd + added_btd
    return stream_btd, stream_btd if norm is None else norm(stream_btd)


def is_fused(norm: nn.Module | None, x: Tensor) -> TypeGuard[RMSNorm]:
    """Whether one operator adds and normalises."""
    # Tensor parallelism replaces the norm by a subclass that reads its weight in another way; 1 + weight is one too.
    return type(norm) is RMSNorm and backend().fuses_matmuls(x)


def fused_add_norm(x_btd: Tensor, added_btd: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same for an RMS norm through the fused operators, on any device."""
    added_md = None if added_btd is None else added_btd.flatten(0, -2)
    both: tuple[Tensor, Tensor] = _AddAndNorm.apply(x_btd.flatten(0, -2), added_md, weight_d.to(x_btd.dtype), eps)  # type: ignore[no-untyped-call]
    return both[0].view_as(x_btd), both[1].view_as(x_btd)


class _AddAndNorm(torch.autograd.Function):
    """Passes the stream through, so that the backward kernel gets both gradients and adds them in the same pass."""

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
        d_stream_md, d_normed_md, *_ = gradients
        dx_md, d_weight = rms_norm_gradient(d_normed_md, d_stream_md, *ctx.saved_tensors)
        return dx_md, dx_md if ctx.with_added else None, d_weight, None


def fp8_add_norm(x_btd: Tensor, added_btd: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """The stream, and its RMS norm as the operand of an fp8 matmul: it is never written in bf16."""
    added_md, weight_d = None if added_btd is None else added_btd.flatten(0, -2), weight_d.to(x_btd.dtype)
    parts: tuple[Tensor, ...] = _AddAndFp8Norm.apply(x_btd.flatten(0, -2), added_md, weight_d, eps)  # type: ignore[no-untyped-call]
    stream_md, placeholder_md, inverses_m, largest = parts
    rows = fp8_normed(stream_md.detach(), inverses_m, weight_d.detach(), largest)
    return stream_md.view_as(x_btd), Fp8Rows(placeholder_md.view(x_btd.shape), *rows)


class _AddAndFp8Norm(torch.autograd.Function):
    """`_AddAndNorm` without the norm: its second output stands for it and holds no data. Then what quantising needs."""

    @staticmethod
    def forward(
        ctx: Any, x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if added_md is None:
            stream_md = x_md
            inverses_m, largest = norm_statistics(x_md, weight_d, eps)
        else:
            stream_md, inverses_m, largest = add_norm_statistics(x_md, added_md, weight_d, eps)
        ctx.save_for_backward(stream_md, inverses_m, weight_d)
        ctx.with_added = added_md is not None
        ctx.mark_non_differentiable(inverses_m, largest)
        return stream_md, placeholder(x_md, x_md.shape[1]), inverses_m, largest

    backward = staticmethod(_AddAndNorm.backward)


@torch.library.custom_op("keepstep::norm_statistics", mutates_args=())
def norm_statistics(x_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The inverse root of each row's mean square, and the largest magnitude of the RMS norm."""
    return _statistics(x_md, None, weight_d, eps)[1:]


@norm_statistics.register_fake
def _(x_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the operator's signature
    return x_md.new_empty(x_md.shape[0], dtype=torch.float32), x_md.new_empty((), dtype=torch.float32)


@torch.library.custom_op("keepstep::add_norm_statistics", mutates_args=())
def add_norm_statistics(x_md: Tensor, added_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, then the same of the sum."""
    return _statistics(x_md, added_md, weight_d, eps)


@add_norm_statistics.register_fake
def _(x_md: Tensor, added_md: Tensor, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    inverses_m, largest = x_md.new_empty(x_md.shape[0], dtype=torch.float32), x_md.new_empty((), dtype=torch.float32)
    return torch.empty_like(x_md), inverses_m, largest


def _statistics(x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if proven("norm", x_md, _prove):
        from keepstep.models.kernels.block import rms_norm_statistics

        added_md = None if added_md is None else added_md.contiguous()
        return rms_norm_statistics(x_md.contiguous(), added_md, weight_d, eps)
    return _statistics_by_torch(x_md, added_md, weight_d, eps)


def _statistics_by_torch(
    x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    stream_md, _, inverses_m = _forward_by_torch(x_md, added_md, weight_d, eps)
    return stream_md, inverses_m, (stream_md.float() * inverses_m[:, None] * weight_d.float()).abs().amax()


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
    if proven("norm", stream_md, _prove):
        from keepstep.models.kernels.block import rms_norm_backward

        return rms_norm_backward(d_normed_md.contiguous(), d_stream_md.contiguous(), stream_md, inverses_m, weight_d)
    return _backward_by_torch(d_normed_md, d_stream_md, stream_md, inverses_m, weight_d)


def _backward_by_torch(
    d_normed_md: Tensor, d_stream_md: Tensor, stream_md: Tensor, inverses_m: Tensor, weight_d: Tensor
) -> tuple[Tensor, Tensor]:
    unit = stream_md.float() * inverses_m[:, None]
    by_unit = d_normed_md.float() * weight_d.float()
    dx = inverses_m[:, None] * (by_unit - unit * (by_unit * unit).mean(1, keepdim=True))
    d_weight = (d_normed_md.float() * unit).sum(0)
    return (d_stream_md.float() + dx).to(stream_md.dtype), d_weight.to(weight_d.dtype)


@rms_norm_gradient.register_fake
def _(d_normed_md: Tensor, d_stream_md: Tensor, stream_md: Tensor, inverses_m: Tensor, weight_d: Tensor) -> Any:  # noqa: ARG001
    return torch.empty_like(stream_md), torch.empty_like(weight_d)


def _forward(x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if proven("norm", x_md, _prove):
        from keepstep.models.kernels.block import rms_norm_forward

        added_md = None if added_md is None else added_md.contiguous()
        return rms_norm_forward(x_md.contiguous(), added_md, weight_d, eps)
    return _forward_by_torch(x_md, added_md, weight_d, eps)


def _forward_by_torch(
    x_md: Tensor, added_md: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    stream_md = x_md if added_md is None else x_md + added_md
    inverses_m = torch.rsqrt(stream_md.float().square().mean(1) + eps)
    return stream_md, F.rms_norm(stream_md, weight_d.shape, weight_d, eps), inverses_m


def _prove(device: torch.device) -> float:
    from keepstep.models.kernels.block import rms_norm_backward, rms_norm_forward, rms_norm_statistics

    generator = torch.Generator().manual_seed(1)
    # More rows than programs of the backward kernel.
    rows = 2200 if device.type == "cuda" else 70
    parts = [torch.randn(size, generator=generator).bfloat16() for size in (*[(rows, 200)] * 4, (200,))]

    def results(form: Any, where: torch.device) -> list[Tensor]:
        forward, statistics, backward = form
        x_md, added_md, d_normed_md, d_stream_md, weight_d = (part.to(where) for part in parts)
        stream_md, normed_md, inverses_m = forward(x_md, added_md, weight_d, 1e-5)
        gradients = backward(d_normed_md, d_stream_md, stream_md, inverses_m, weight_d)
        found = [*statistics(x_md, added_md, weight_d, 1e-5), *statistics(x_md, None, weight_d, 1e-5)[1:]]
        return [stream_md, normed_md, inverses_m, *forward(x_md, None, weight_d, 1e-5)[1:], *gradients, *found]

    kernels = rms_norm_forward, rms_norm_statistics, rms_norm_backward
    return difference(results, kernels, (_forward_by_torch, _statistics_by_torch, _backward_by_torch), device)
