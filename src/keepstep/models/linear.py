"""The linear modules a block can be made of. A new kind is a class here and a line in `make_linear`, or a plug-in.

A kind keeps its parameters as `weight` [out, in] and `bias` [out] or None: initialisation, tensor parallelism,
checkpoints and import from Hugging Face then work with it unchanged.

The three matmuls of an fp8 layer (output, input gradient, weight gradient) run in fp8. Scaling is per tensor and
dynamic: each operand gets its scale from its largest magnitude, at the moment it is used (`ops/fp8.py`). Results are
bf16; weights, optimizer and everything outside the matmuls stay as they are.

No pass over memory only quantises, where one operator can write what the next multiplies: RMS norms, SwiGLU and its
gradient write fp8, and nobody reads them in bf16. The residual is added by the next norm, as cuBLASLt's fastest fp8
kernels cannot add it.

The tensor cores' fast accumulation keeps about 14 bits and cuts off the rest. Outputs, sums over a layer's inputs,
tolerate that (0.1 to 0.9%, next to 3.6% of the format itself). Gradients are sums over outputs or all tokens: there
it would be up to 8.5%, and 6% of a weight's gradient would be missing. They accumulate in fp32, for 2.5% of the step.

Shape legend: m tokens, k inputs, n outputs; a trailing 8 is a tensor in fp8, a t before it says transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.core.plugins import load_plugin
from keepstep.models.ops.fp8 import (
    BACKWARD,
    FORWARD,
    Fp8Rows,
    Quantized,
    as_fp8_rows,
    fake_quantized,
    fp8_swiglu,
    placeholder,
    swiglu_gradient_to_fp8,
    to_fp8,
)
from keepstep.models.ops.matmul import scaled_gemm
from keepstep.models.ops.swiglu import swiglu

PLUGINS = {"sparse": "keepstep.models.sparse:sparse_linear"}
"""Plug-ins that we ship, by their short names."""
_MULTIPLE = 16
"""The tensor cores' fp8 matmuls need sizes that are multiples of this."""


def is_dense(linear: nn.Module) -> bool:
    """A matmul with or without a bias: neither another kind nor a wrapper."""
    return type(linear) is nn.Linear


def is_plain(linear: nn.Module) -> bool:
    """A matmul and nothing else."""
    return type(linear) is nn.Linear and linear.bias is None


def make_linear(config: ModelConfig, layer: str, in_features: int, out_features: int, bias: bool) -> nn.Linear:
    """One projection of a block, of the kind that `model.linear` names where `model.linear_layers` has it."""
    match config.linear if layer in config.linear_layers else "dense":
        case "dense":
            return nn.Linear(in_features, out_features, bias)
        case "bitnet":
            return BitLinear(in_features, out_features, bias)
        case "fp8":
            return Fp8Linear(in_features, out_features, bias)
        case name:
            return _make_plugin(name, config.linear_options, in_features, out_features, bias)


def _make_plugin(name: str, options: Mapping[str, Any], in_features: int, out_features: int, bias: bool) -> nn.Linear:
    factory = load_plugin("linear", PLUGINS.get(name, name), options, "model.linear")
    layer = factory(in_features=in_features, out_features=out_features, bias=bias, **options)
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"model.linear: {name} returns a {type(layer).__name__}, which is no torch.nn.Linear",
            "derive it from torch.nn.Linear: initialization, sharding and checkpoints know its weight and bias",
        )
    if list(layer.buffers()):
        raise ConfigError(
            f"model.linear: {name} has buffers, which neither the first weights nor checkpoints fill",
            "compute them from the weights in forward, or make them parameters",
        )
    return layer


class BitLinear(nn.Linear):
    """BitNet b1.58: weights of -1, 0 or 1 with one scale, activations in 255 steps a token.

    Full-precision weights are kept for the optimizer. Gradients pass the rounding as if it were not there
    (straight-through), so that small updates add up until a weight changes its step.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """Multiply what both sides round to."""
        weight = _straight_through(self.weight, _round_ternary(self.weight))
        return F.linear(_straight_through(input, _round_tokens(input)), weight, self.bias)


def _straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    return exact + (rounded - exact).detach()


def _round_ternary(weight: Tensor) -> Tensor:
    # The mean magnitude is the scale: about a third of normally distributed weights become 0.
    scale = weight.abs().mean().clamp(min=1e-5)
    return (weight / scale).round().clamp(-1, 1) * scale


def _round_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
    return (x / scale).round() * scale


class Fp8Linear(nn.Linear):
    """A linear layer with bf16 in and out and fp8 matmuls."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        if in_features % _MULTIPLE or out_features % _MULTIPLE:
            raise ConfigError(
                f"fp8 needs layer sizes that are multiples of {_MULTIPLE}, not {in_features} → {out_features}",
                "change model.hidden or model.ffn_hidden, or use precision=bf16",
            )
        super().__init__(in_features, out_features, bias)

    def forward(self, input: Tensor | Fp8Rows) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """The matmul, plus the bias in the output's precision."""
        return self.with_bias(_multiply(as_fp8_rows(input), self.weight.to(input.dtype)), input)

    def with_bias(self, out_mn: Tensor, like: Tensor | Fp8Rows) -> Tensor:
        """The matmul's output in the shape of its input, plus the bias."""
        output: Tensor = out_mn.unflatten(0, like.shape[:-1])
        bias: Tensor | None = self.bias
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output


def fp8_swiglu_mlp(x: Tensor | Fp8Rows, gate_up: Fp8Linear, down: Fp8Linear, width: int) -> Tensor:
    """SwiGLU between two fp8 matmuls, in kernels that read and write what these multiply. No biases inside."""
    bias: Tensor | None = gate_up.bias
    if bias is not None:
        output: Tensor = down(swiglu(gate_up(x), width))
        return output
    rows = as_fp8_rows(x)
    weight_nk = gate_up.weight.to(x.dtype)
    fused_mn, w8_kn, w_inv_scale = fp8_matmul(rows.straight_mk, rows.undo, weight_nk.detach())
    kept = fused_mn, rows.transposed_km, rows.undo, w8_kn, w_inv_scale
    placeholder_mf: Tensor = _GatedGradients.apply(rows.origin.flatten(0, -2), weight_nk, width, *kept)  # type: ignore[no-untyped-call]
    h = Fp8Rows(placeholder_mf, *fp8_swiglu(fused_mn, width))
    return down.with_bias(_multiply(h, down.weight.to(x.dtype)), x)


def _multiply(rows: Fp8Rows, weight_nk: Tensor) -> Tensor:
    """The matmul's output [m, n]."""
    out_mn: Tensor = _Fp8Matmul.apply(rows.origin.flatten(0, -2), weight_nk, *rows[1:])  # type: ignore[no-untyped-call]
    return out_mn


class _Fp8Matmul(torch.autograd.Function):
    """x · wᵀ of operands in fp8; gradients go to both as they were before."""

    @staticmethod
    def forward(
        ctx: Any, _origin_mk: Tensor, weight_nk: Tensor, x8_mk: Tensor, x8_km: Tensor, x_inv_scale: Tensor
    ) -> Tensor:
        product: tuple[Tensor, Tensor, Tensor] = fp8_matmul(x8_mk, x_inv_scale, weight_nk)
        out_mn, w8_kn, w_inv_scale = product
        ctx.save_for_backward(x8_km, x_inv_scale, w8_kn, w_inv_scale)
        return out_mn

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy_mn,) = gradients
        return *fp8_matmul_backward(dy_mn.contiguous(), *ctx.saved_tensors), None, None, None


class _GatedGradients(torch.autograd.Function):
    """Computes the gradients of SwiGLU and the matmul before it. Its output stands for SwiGLU's and holds no data."""

    @staticmethod
    def forward(ctx: Any, origin_mk: Tensor, _weight_nk: Tensor, width: int, *kept: Tensor) -> Tensor:
        ctx.width = width
        ctx.save_for_backward(*kept)
        return placeholder(origin_mk, kept[0].shape[1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        fused_mn, *kept = ctx.saved_tensors
        (dh_mf,) = gradients
        return *fp8_swiglu_backward(dh_mf.contiguous(), fused_mn, ctx.width, *kept), *[None] * 6


@torch.library.custom_op("keepstep::fp8_matmul", mutates_args=())
def fp8_matmul(x8_mk: Tensor, x_inv_scale: Tensor, w_nk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x · wᵀ, then the weight as the backward pass needs it."""
    w8_nk, w8_kn, w_inv_scale = to_fp8(w_nk, FORWARD)
    out_mn = scaled_gemm(x8_mk, w8_nk, x_inv_scale, w_inv_scale, w_nk.dtype, fast_sums=True)
    return out_mn, w8_kn, w_inv_scale


@fp8_matmul.register_fake
def _(x8_mk: Tensor, x_inv_scale: Tensor, w_nk: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    return w_nk.new_empty((x8_mk.shape[0], w_nk.shape[0])), *fake_quantized(w_nk, *w_nk.shape)[1:]


@torch.library.custom_op("keepstep::fp8_matmul_backward", mutates_args=())
def fp8_matmul_backward(
    dy_mn: Tensor, x8_km: Tensor, x_inv_scale: Tensor, w8_kn: Tensor, w_inv_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of both sides: dy · w and dyᵀ · x."""
    return _gradients(to_fp8(dy_mn, BACKWARD), (x8_km, x_inv_scale, w8_kn, w_inv_scale), dy_mn.dtype)


@fp8_matmul_backward.register_fake
def _(dy_mn: Tensor, x8_km: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_gradients(dy_mn, x8_km, dy_mn.shape[1])


@torch.library.custom_op("keepstep::fp8_swiglu_backward", mutates_args=())
def fp8_swiglu_backward(
    dh_mf: Tensor, fused_mn: Tensor, width: int, x8_km: Tensor, x_inv_scale: Tensor, w8_kn: Tensor, w_inv_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and w through SwiGLU and the matmul."""
    dy = swiglu_gradient_to_fp8(dh_mf, fused_mn, width)
    return _gradients(dy, (x8_km, x_inv_scale, w8_kn, w_inv_scale), dh_mf.dtype)


@fp8_swiglu_backward.register_fake
def _(dh_mf: Tensor, fused_mn: Tensor, width: int, x8_km: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _fake_gradients(dh_mf, x8_km, fused_mn.shape[1])


def _gradients(dy: Quantized, kept: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x8_km, x_inv_scale, w8_kn, w_inv_scale = kept
    dy8_mn, dy8_nm, dy_inv_scale = dy
    dx_mk = scaled_gemm(dy8_mn, w8_kn, dy_inv_scale, w_inv_scale, dtype, fast_sums=False)
    return dx_mk, scaled_gemm(dy8_nm, x8_km, dy_inv_scale, x_inv_scale, dtype, fast_sums=False)


def _fake_gradients(gradient: Tensor, x8_km: Tensor, n: int) -> tuple[Tensor, Tensor]:
    k, m = x8_km.shape
    return gradient.new_empty((m, k)), gradient.new_empty((n, k))
