"""Operands of fp8 matmuls, written straight and transposed by the operator that computes them; one scale for a tensor.

Activations and weights take e4m3 (three bits of precision), gradients e5m2 (more range). A kernel that writes fp8 does
not know the largest magnitude yet. So it takes that of a sample with headroom, and the tensor is written again where
that was too low (`kernels/fp8.py`). Torch's operators give the same numbers elsewhere.

Shape legend: m tokens, k inputs, f feed-forward width; a fused input [m, 2f] holds blocks of `width` gates, then their
ups; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import difference
from keepstep.models.ops.backend import proven
from keepstep.models.ops.swiglu import swiglu_backward_by_torch, swiglu_by_torch

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
HEADROOM = 8.0
SAMPLED_ROWS = 512
"""A tensor of up to twice as many rows is measured whole."""
Quantized = tuple[Tensor, Tensor, Tensor]
"""A matrix in fp8, the same transposed, and the factor that undoes their scale."""


class Fp8Rows(NamedTuple):
    """The left operand of a matmul."""

    origin: Tensor
    """Receives the gradient: the rows in bf16, or a placeholder without data where nobody wrote them in bf16."""
    straight_mk: Tensor
    transposed_km: Tensor
    undo: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the rows in bf16."""
        return self.origin.shape

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the gradient, and of what the matmul returns."""
        return self.origin.dtype


def as_fp8_rows(x: Tensor | Fp8Rows) -> Fp8Rows:
    """The rows quantised, unless they are."""
    return x if isinstance(x, Fp8Rows) else Fp8Rows(x, *fp8_rows(x.detach().flatten(0, -2)))


def placeholder(like: Tensor, columns: int) -> Tensor:
    """Stands for an output [m, columns] in the autograd graph; it holds no data."""
    return like.new_empty(()).expand(like.shape[0], columns)


@torch.library.custom_op("keepstep::fp8_rows", mutates_args=())
def fp8_rows(x_mk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matmul's left operand in e4m3."""
    return to_fp8(x_mk, FORWARD)


@fp8_rows.register_fake
def _(x_mk: Tensor) -> Quantized:
    return fake_quantized(x_mk, *x_mk.shape)


@torch.library.custom_op("keepstep::fp8_normed", mutates_args=())
def fp8_normed(
    stream_mk: Tensor, inverses_m: Tensor, weight_k: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of the rows in e4m3, from the inverse roots of their mean squares."""
    if proven("fp8", stream_mk, _prove):
        from keepstep.models.kernels.fp8 import quantize_normed

        return quantize_normed(stream_mk.contiguous(), inverses_m, weight_k, largest)
    return _normed_by_torch(stream_mk, inverses_m, weight_k, largest)


def _normed_by_torch(stream_mk: Tensor, inverses_m: Tensor, weight_k: Tensor, largest: Tensor) -> Quantized:
    return to_fp8_by_torch(stream_mk.float() * inverses_m[:, None] * weight_k.float(), FORWARD, largest)


@fp8_normed.register_fake
def _(stream_mk: Tensor, inverses_m: Tensor, weight_k: Tensor, largest: Tensor) -> Quantized:  # noqa: ARG001
    return fake_quantized(stream_mk, *stream_mk.shape)


@torch.library.custom_op("keepstep::fp8_swiglu", mutates_args=())
def fp8_swiglu(fused_mf: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) × up in e4m3."""
    if proven("fp8", fused_mf, _prove):
        from keepstep.models.kernels.fp8 import swiglu

        return swiglu(fused_mf.contiguous(), width)
    return _swiglu_by_torch(fused_mf, width)


def _swiglu_by_torch(fused_mf: Tensor, width: int) -> Quantized:
    return to_fp8_by_torch(swiglu_by_torch(fused_mf, width), FORWARD)


@fp8_swiglu.register_fake
def _(fused_mf: Tensor, width: int) -> Quantized:  # noqa: ARG001 - the operator's own signature
    return fake_quantized(fused_mf, fused_mf.shape[0], fused_mf.shape[1] // 2)


def swiglu_gradient_to_fp8(dh_mf: Tensor, fused_mf: Tensor, width: int) -> Quantized:
    """The gradient of the fused input in e5m2."""
    if proven("fp8", fused_mf, _prove):
        from keepstep.models.kernels.fp8 import swiglu_backward

        return swiglu_backward(dh_mf.contiguous(), fused_mf.contiguous(), width)
    return _swiglu_gradient_by_torch(dh_mf, fused_mf, width)


def _swiglu_gradient_by_torch(dh_mf: Tensor, fused_mf: Tensor, width: int) -> Quantized:
    return to_fp8_by_torch(swiglu_backward_by_torch(dh_mf, fused_mf, width), BACKWARD)


def fake_quantized(like: Tensor, rows: int, columns: int) -> Quantized:
    """What the operators that write e4m3 return."""
    straight, transposed = (like.new_empty(shape, dtype=FORWARD) for shape in ((rows, columns), (columns, rows)))
    return straight, transposed, like.new_empty((), dtype=torch.float32)


def to_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> Quantized:
    """`x` in fp8, the same transposed, and what undoes the scale; `largest` is the end of the range if it is given."""
    if proven("fp8", x, _prove):
        from keepstep.models.kernels.fp8 import quantize

        return quantize(x.contiguous(), dtype, largest)
    return to_fp8_by_torch(x, dtype, largest)


def to_fp8_by_torch(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> Quantized:
    """The same by torch's operators."""
    limit = torch.finfo(dtype).max
    undo = (_end_of_range(x) if largest is None else largest).clamp(min=1e-12) / limit
    small = (x.float() / undo).clamp(-limit, limit).to(dtype)
    return small, small.t().contiguous(), undo


def _end_of_range(x: Tensor) -> Tensor:
    """The largest magnitude that fits: with headroom over a sample, or where that does not suffice the true one."""
    largest, step = x.abs().amax().float(), max(1, len(x) // SAMPLED_ROWS)
    return largest if step == 1 else torch.maximum(x[::step].abs().amax().float() * HEADROOM, largest)


def _prove(device: torch.device) -> float:
    from keepstep.models.kernels import fp8

    generator = torch.Generator().manual_seed(1)
    # More rows than are measured, and sizes that no tile divides. The second has its largest numbers past the sample.
    calm, wild = torch.randn(2, 1041, 144, generator=generator).bfloat16()
    wild[7] *= 100
    factors = [torch.rand(size, generator=generator) + 0.5 for size in calm.shape]

    def results(form: Any, where: torch.device) -> list[Tensor]:
        quantize, quantize_normed, swiglu, swiglu_backward = form
        sources, (inverses, weight) = [calm.to(where), wild.to(where)], (factor.to(where) for factor in factors)
        found = [quantize(source, dtype) for source in sources for dtype in (FORWARD, BACKWARD)]
        # Half of the largest magnitude: what is above it must saturate.
        half = calm.abs().amax().float().to(where) / 2
        # Then sizes that tiles divide: their kernels move more at a time.
        found += [quantize(sources[0], BACKWARD, half), quantize(sources[0][:256, :128].contiguous(), FORWARD)]
        found.append(quantize_normed(sources[0], inverses, weight.bfloat16(), 4 * half))
        for source in sources:
            # Blocks that tiles divide, and others.
            found += [swiglu(source[:, : 4 * width].contiguous(), width) for width in (36, 32)]
            found.append(swiglu_backward(calm[:, :72].to(where).contiguous(), source, 36))
            even = source[:1024, :128].contiguous()
            found += [swiglu(even, 64), swiglu_backward(calm[:1024, :64].to(where).contiguous(), even, 64)]
        return [part for parts in found for part in parts]

    kernels = fp8.quantize, fp8.quantize_normed, fp8.swiglu, fp8.swiglu_backward
    plain = to_fp8_by_torch, _normed_by_torch, _swiglu_by_torch, _swiglu_gradient_by_torch
    return difference(results, kernels, plain, device)
