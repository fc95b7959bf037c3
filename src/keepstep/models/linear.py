"""The linear modules a block can be made of. A new kind is a class here and a line in `make_linear`, or a plug-in.

A kind keeps its parameters as `weight` [out, in] and `bias` [out] or None: initialisation, tensor parallelism,
checkpoints and import from Hugging Face then work with it unchanged.

The three matmuls of an fp8 layer (output, input gradient, weight gradient) run in fp8. Scaling is per tensor and
dynamic: each operand is scaled so that its largest magnitude becomes the largest number of the format, at the moment it
is used. Activations and weights take e4m3 (three bits of precision), gradients e5m2 (more range). Results are bf16;
weights, optimizer and everything outside the matmuls stay as they are.

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
from keepstep.models.kernels.cuda import difference
from keepstep.models.ops.backend import proven
from keepstep.models.ops.matmul import scaled_gemm
from keepstep.models.ops.swiglu import activate, activate_backward, swiglu

PLUGINS = {"sparse": "keepstep.models.sparse:sparse_linear"}
"""Plug-ins that we ship, by their short names."""
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
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

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """The matmul, plus the bias in the output's precision."""
        return self.with_bias(fp8_matmul(input.flatten(0, -2), self.weight.to(input.dtype), None)[0], input)

    def with_bias(self, out_mn: Tensor, like: Tensor) -> Tensor:
        """The matmul's output in the shape of its input, plus the bias."""
        output: Tensor = out_mn.unflatten(0, like.shape[:-1])
        bias: Tensor | None = self.bias
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output


def fp8_swiglu_mlp(x: Tensor, gate_up: Fp8Linear, down: Fp8Linear, width: int) -> Tensor:
    """SwiGLU between two fp8 matmuls; the kernels between them also compute the scales. No biases inside."""
    bias: Tensor | None = gate_up.bias
    if bias is not None:
        output: Tensor = down(swiglu(gate_up(x), width))
        return output
    h_mf, largest, *_ = fp8_swiglu_forward(x.flatten(0, -2), gate_up.weight.to(x.dtype), width)
    return down.with_bias(fp8_matmul(h_mf, down.weight.to(x.dtype), largest)[0], x)


Kept = tuple[Tensor, Tensor, Tensor, Tensor]
"""Both operands of a matmul transposed in fp8, each with the factor that undoes its scale."""


@torch.library.custom_op("keepstep::fp8_matmul", mutates_args=())
def fp8_matmul(x_mk: Tensor, w_nk: Tensor, x_amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x · wᵀ, then what the backward pass needs. `x_amax` is the largest magnitude of x if it is known."""
    out_mn, kept = _forward(x_mk, w_nk, x_amax)
    return out_mn, *kept


@fp8_matmul.register_fake
def _(x_mk: Tensor, w_nk: Tensor, x_amax: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG001
    return x_mk.new_empty((x_mk.shape[0], w_nk.shape[0])), *_fake_kept(x_mk, w_nk)


@torch.library.custom_op("keepstep::fp8_matmul_backward", mutates_args=())
def fp8_matmul_backward(
    dy_mn: Tensor, x8_km: Tensor, x_inv_scale: Tensor, w8_kn: Tensor, w_inv_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of both sides: dy · w and dyᵀ · x."""
    return _gradients(dy_mn, None, (x8_km, x_inv_scale, w8_kn, w_inv_scale))


@fp8_matmul_backward.register_fake
def _(dy_mn: Tensor, x8_km: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_gradients(dy_mn, x8_km, dy_mn.shape[1])


@torch.library.custom_op("keepstep::fp8_swiglu_forward", mutates_args=())
def fp8_swiglu_forward(
    x_mk: Tensor, w_nk: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """silu(gate) × up of x · wᵀ with its largest magnitude, then what the backward pass needs."""
    fused_mn, kept = _forward(x_mk, w_nk, None)
    h_mf, largest = activate(fused_mn, width, with_amax=True)
    return h_mf, largest, fused_mn, *kept


@fp8_swiglu_forward.register_fake
def _(x_mk: Tensor, w_nk: Tensor, width: int) -> tuple[Tensor, ...]:  # noqa: ARG001
    (m, _), n = x_mk.shape, w_nk.shape[0]
    largest = x_mk.new_empty((), dtype=torch.float32)
    return x_mk.new_empty((m, n // 2)), largest, x_mk.new_empty((m, n)), *_fake_kept(x_mk, w_nk)


@torch.library.custom_op("keepstep::fp8_swiglu_backward", mutates_args=())
def fp8_swiglu_backward(
    dh_mf: Tensor, fused_mn: Tensor, width: int, x8_km: Tensor, x_inv_scale: Tensor, w8_kn: Tensor, w_inv_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and w through SwiGLU and the matmul."""
    dy_mn, largest = activate_backward(dh_mf, fused_mn, width, with_amax=True)
    return _gradients(dy_mn, largest, (x8_km, x_inv_scale, w8_kn, w_inv_scale))


@fp8_swiglu_backward.register_fake
def _(dh_mf: Tensor, fused_mn: Tensor, width: int, x8_km: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _fake_gradients(dh_mf, x8_km, fused_mn.shape[1])


def _forward(x_mk: Tensor, w_nk: Tensor, x_amax: Tensor | None) -> tuple[Tensor, Kept]:
    x8_mk, x8_km, x_inv_scale = to_fp8(x_mk, FORWARD, x_amax)
    w8_nk, w8_kn, w_inv_scale = to_fp8(w_nk, FORWARD)
    out_mn = scaled_gemm(x8_mk, w8_nk, x_inv_scale, w_inv_scale, x_mk.dtype, fast_sums=True)
    return out_mn, (x8_km, x_inv_scale, w8_kn, w_inv_scale)


def _gradients(dy_mn: Tensor, largest: Tensor | None, kept: Kept) -> tuple[Tensor, Tensor]:
    x8_km, x_inv_scale, w8_kn, w_inv_scale = kept
    dy8_mn, dy8_nm, dy_inv_scale = to_fp8(dy_mn, BACKWARD, largest)
    dx_mk = scaled_gemm(dy8_mn, w8_kn, dy_inv_scale, w_inv_scale, dy_mn.dtype, fast_sums=False)
    return dx_mk, scaled_gemm(dy8_nm, x8_km, dy_inv_scale, x_inv_scale, dy_mn.dtype, fast_sums=False)


def _fake_kept(x_mk: Tensor, w_nk: Tensor) -> Kept:
    (m, k), n = x_mk.shape, w_nk.shape[0]
    x_inv_scale, w_inv_scale = (x_mk.new_empty((), dtype=torch.float32) for _ in range(2))
    return x_mk.new_empty((k, m), dtype=FORWARD), x_inv_scale, x_mk.new_empty((k, n), dtype=FORWARD), w_inv_scale


def _fake_gradients(gradient: Tensor, x8_km: Tensor, n: int) -> tuple[Tensor, Tensor]:
    k, m = x8_km.shape
    return gradient.new_empty((m, k)), gradient.new_empty((n, k))


def _keep_product(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the names torch calls it with
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _product_backward(ctx: Any, dy_mn: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
    return *fp8_matmul_backward(dy_mn.contiguous(), *ctx.saved_tensors), None


def _keep_gated(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.width = inputs[2]
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])


def _gated_backward(ctx: Any, dh_mf: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
    fused_mn, *kept = ctx.saved_tensors
    return *fp8_swiglu_backward(dh_mf.contiguous(), fused_mn, ctx.width, *kept), None


fp8_matmul.register_autograd(_product_backward, setup_context=_keep_product)
fp8_swiglu_forward.register_autograd(_gated_backward, setup_context=_keep_gated)


def to_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`x` in fp8, its largest magnitude filling the format; the same transposed; and what undoes the scale."""
    if largest is None:
        largest = torch.linalg.vector_norm(x, ord=float("inf"), dtype=torch.float32)
    if proven("fp8", x, _prove):
        from keepstep.models.kernels.block import quantize_with_transpose

        return quantize_with_transpose(x.contiguous(), largest, dtype)
    return _to_fp8_by_torch(x, largest, dtype)


def _to_fp8_by_torch(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    limit = torch.finfo(dtype).max
    undo = largest.clamp(min=1e-12) / limit
    small = (x.float() / undo).clamp(-limit, limit).to(dtype)
    return small, small.t().contiguous(), undo


def _prove(device: torch.device) -> float:
    from keepstep.models.kernels.block import quantize_with_transpose

    source = torch.randn(144, 272, generator=torch.Generator().manual_seed(1)).bfloat16()

    def results(form: Any, where: torch.device) -> list[Tensor]:
        x = source.to(where)
        # Half of the largest magnitude: what is above it must saturate.
        limits = (FORWARD, x.abs().amax().float()), (BACKWARD, x.abs().amax().float() / 2)
        return [part for dtype, largest in limits for part in form(x, largest, dtype)]

    return difference(results, quantize_with_transpose, _to_fp8_by_torch, device)
