"""Linear layers whose three products (output, input gradient, weight gradient) run in fp8.

Scaling is per tensor and dynamic: each operand is scaled so that its largest magnitude becomes the largest number of
the format, at the moment it is used. Activations and weights take e4m3 (three bits of precision), gradients e5m2 (more
range). Results are bf16; weights, optimizer and everything outside the products stay as they are.

The tensor cores' fast sums keep about 14 bits and cut off the rest. Outputs, sums over a layer's inputs, stand that
(0.1 to 0.9% beside the 3.6% of the format itself). Gradients are sums over outputs or over all tokens: there it would
be up to 8.5%, and 6% of a weight's gradient would be missing. They are added up in fp32, for 2.5% of the step.

Shape legend: m tokens, k inputs, n outputs; a trailing 8 is a tensor in fp8, a t before it says transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keepstep.core.errors import ConfigError
from keepstep.models.fp8_products import scaled_product
from keepstep.models.kernels.cublaslt import Operands
from keepstep.models.swiglu import activate, activate_backward, swiglu
from keepstep.models.triton_found import has_triton

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""The tensor cores' fp8 products need sizes that are multiples of this."""


class Fp8Linear(nn.Linear):
    """A linear layer with bf16 in and out and fp8 products."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        if in_features % _MULTIPLE or out_features % _MULTIPLE:
            raise ConfigError(
                f"fp8 needs layer sizes that are multiples of {_MULTIPLE}, not {in_features} → {out_features}",
                "change model.hidden or model.ffn_hidden, or use precision=bf16",
            )
        super().__init__(in_features, out_features, bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """The product, plus the bias in the output's precision."""
        return self.with_bias(fp8_product(input.flatten(0, -2), self.weight.to(input.dtype), None)[0], input)

    def with_bias(self, product_mn: Tensor, like: Tensor) -> Tensor:
        """The product in the shape of the input it came from, plus the bias."""
        output: Tensor = product_mn.unflatten(0, like.shape[:-1])
        bias: Tensor | None = self.bias
        if bias is not None:
            output = output + bias.to(output.dtype)
        return output


def fp8_gated(x: Tensor, gate_up: Fp8Linear, down: Fp8Linear, width: int) -> Tensor:
    """SwiGLU between two fp8 products; the kernels between them find the scales on the way. No biases inside."""
    bias: Tensor | None = gate_up.bias
    if bias is not None:
        output: Tensor = down(swiglu(gate_up(x), width))
        return output
    h_mf, largest, *_ = fp8_gated_product(x.flatten(0, -2), gate_up.weight.to(x.dtype), width)
    return down.with_bias(fp8_product(h_mf, down.weight.to(x.dtype), largest)[0], x)


Kept = tuple[Tensor, Tensor, Tensor, Tensor]
"""Both sides of a product transposed in fp8, each with the factor that undoes its scale."""


@torch.library.custom_op("keepstep::fp8_product", mutates_args=())
def fp8_product(x_mk: Tensor, w_nk: Tensor, x_largest: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x · wᵀ, then what the backward pass needs. `x_largest` is the largest magnitude of x where somebody knows it."""
    product_mn, kept = _forward(x_mk, w_nk, x_largest)
    return product_mn, *kept


@fp8_product.register_fake
def _(x_mk: Tensor, w_nk: Tensor, x_largest: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG001
    return x_mk.new_empty((x_mk.shape[0], w_nk.shape[0])), *_fake_kept(x_mk, w_nk)


@torch.library.custom_op("keepstep::fp8_gradients", mutates_args=())
def fp8_gradients(dy_mn: Tensor, x8_km: Tensor, x_undo: Tensor, w8_kn: Tensor, w_undo: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both sides: dy · w and dyᵀ · x."""
    return _gradients(dy_mn, None, (x8_km, x_undo, w8_kn, w_undo))


@fp8_gradients.register_fake
def _(dy_mn: Tensor, x8_km: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_gradients(dy_mn, x8_km, dy_mn.shape[1])


@torch.library.custom_op("keepstep::fp8_gated_product", mutates_args=())
def fp8_gated_product(
    x_mk: Tensor, w_nk: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """silu(gate) × up of x · wᵀ with its largest magnitude, then what the backward pass needs."""
    fused_mn, kept = _forward(x_mk, w_nk, None)
    h_mf, largest = activate(fused_mn, width, with_largest=True)
    return h_mf, largest, fused_mn, *kept


@fp8_gated_product.register_fake
def _(x_mk: Tensor, w_nk: Tensor, width: int) -> tuple[Tensor, ...]:  # noqa: ARG001
    (m, _), n = x_mk.shape, w_nk.shape[0]
    largest = x_mk.new_empty((), dtype=torch.float32)
    return x_mk.new_empty((m, n // 2)), largest, x_mk.new_empty((m, n)), *_fake_kept(x_mk, w_nk)


@torch.library.custom_op("keepstep::fp8_gated_gradients", mutates_args=())
def fp8_gated_gradients(
    dh_mf: Tensor, fused_mn: Tensor, width: int, x8_km: Tensor, x_undo: Tensor, w8_kn: Tensor, w_undo: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and w through SwiGLU and the product."""
    dy_mn, largest = activate_backward(dh_mf, fused_mn, width, with_largest=True)
    return _gradients(dy_mn, largest, (x8_km, x_undo, w8_kn, w_undo))


@fp8_gated_gradients.register_fake
def _(dh_mf: Tensor, fused_mn: Tensor, width: int, x8_km: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _fake_gradients(dh_mf, x8_km, fused_mn.shape[1])


def _forward(x_mk: Tensor, w_nk: Tensor, x_largest: Tensor | None) -> tuple[Tensor, Kept]:
    x8_mk, x8_km, x_undo = to_fp8(x_mk, FORWARD, x_largest)
    w8_nk, w8_kn, w_undo = to_fp8(w_nk, FORWARD)
    return multiply(x8_mk, w8_nk, x_undo, w_undo, x_mk.dtype, fast_sums=True), (x8_km, x_undo, w8_kn, w_undo)


def _gradients(dy_mn: Tensor, largest: Tensor | None, kept: Kept) -> tuple[Tensor, Tensor]:
    x8_km, x_undo, w8_kn, w_undo = kept
    dy8_mn, dy8_nm, dy_undo = to_fp8(dy_mn, BACKWARD, largest)
    dx_mk = multiply(dy8_mn, w8_kn, dy_undo, w_undo, dy_mn.dtype, fast_sums=False)
    return dx_mk, multiply(dy8_nm, x8_km, dy_undo, x_undo, dy_mn.dtype, fast_sums=False)


def _fake_kept(x_mk: Tensor, w_nk: Tensor) -> Kept:
    (m, k), n = x_mk.shape, w_nk.shape[0]
    x_undo, w_undo = (x_mk.new_empty((), dtype=torch.float32) for _ in range(2))
    return x_mk.new_empty((k, m), dtype=FORWARD), x_undo, x_mk.new_empty((k, n), dtype=FORWARD), w_undo


def _fake_gradients(gradient: Tensor, x8_km: Tensor, n: int) -> tuple[Tensor, Tensor]:
    k, m = x8_km.shape
    return gradient.new_empty((m, k)), gradient.new_empty((n, k))


def _keep_product(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the names torch calls it with
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _product_backward(ctx: Any, dy_mn: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
    return *fp8_gradients(dy_mn.contiguous(), *ctx.saved_tensors), None


def _keep_gated(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.width = inputs[2]
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])


def _gated_backward(ctx: Any, dh_mf: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
    fused_mn, *kept = ctx.saved_tensors
    return *fp8_gated_gradients(dh_mf.contiguous(), fused_mn, ctx.width, *kept), None


fp8_product.register_autograd(_product_backward, setup_context=_keep_product)
fp8_gated_product.register_autograd(_gated_backward, setup_context=_keep_gated)


def to_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`x` in fp8, its largest magnitude filling the format; the same transposed; and what undoes the scale."""
    if largest is None:
        largest = torch.linalg.vector_norm(x, ord=float("inf"), dtype=torch.float32)
    if x.is_cuda and has_triton():
        from keepstep.models.kernels.quantise import quantise_both

        return quantise_both(x.contiguous(), largest, dtype)
    limit = torch.finfo(dtype).max
    undo = largest.clamp(min=1e-12) / limit
    small = (x.float() / undo).clamp(-limit, limit).to(dtype)
    return small, small.t().contiguous(), undo


def multiply(
    a8_ij: Tensor, b8_lj: Tensor, a_undo: Tensor, b_undo: Tensor, dtype: torch.dtype, *, fast_sums: bool
) -> Tensor:
    """a · bᵀ with both scales undone; both sides are contiguous along the dimension that is summed."""
    if a8_ij.is_cuda:
        return scaled_product(Operands(a8_ij, b8_lj, a_undo, b_undo), dtype, fast_sums=fast_sums)
    return ((a8_ij.float() @ b8_lj.float().t()) * (a_undo * b_undo)).to(dtype)
