"""Large matmuls with the fastest kernel, in bf16 and in fp8, and those that add a matrix in their epilogue.

For the matmuls of a head over 128 thousand tokens cuBLAS's choice was up to 6% slower than its best kernel on an H200;
for those inside blocks it was the best. The choice that torch gets for fp8 is up to 19% slower (docs/performance.md).
Candidates are timed on the actual operands, at a shape's first use on this kind of machine (`kernels/cublaslt.py`).

The matmul that ends a sub-block adds the residual stream: a separate addition takes two more passes over the stream.
cuBLASLt adds in the epilogue, in fp32 and before the only rounding; torch's addmm does so too, but copies the matrix.

Shape legend: b rows, t tokens, m = b·t, n outputs, k what is summed over, d hidden; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cublaslt import Gemm, ScaledGemm, fastest_kernel, library

_WORTH_A_CHOICE, _WORTH_AN_FP8_CHOICE = 1 << 42, 1 << 40
"""Operations of a matmul that is worth a choice: trying its kernels takes about 60 times the matmul's own time. In fp8
trying one takes half a second, most of it to load kernels."""
_WORTH_A_SUM = 1 << 37

_choices: dict[Any, tuple[Gemm, Any] | None] = {}
_fp8_choices: dict[Any, tuple[ScaledGemm, Any] | None] = {}


def scaled_gemm(
    a8_mk: Tensor, b8_nk: Tensor, a_inv_scale: Tensor, b_inv_scale: Tensor, dtype: torch.dtype, *, fast_sums: bool
) -> Tensor:
    """a · bᵀ with both scales undone; both sides are contiguous along the dimension that is summed."""
    out_mn = a8_mk.new_empty((a8_mk.shape[0], b8_nk.shape[0]), dtype=dtype)
    scaled_gemm_into(out_mn, a8_mk, b8_nk, a_inv_scale, b_inv_scale, fast_sums=fast_sums)
    return out_mn


def scaled_gemm_into(
    out_mn: Tensor, a8_mk: Tensor, b8_nk: Tensor, a_inv_scale: Tensor, b_inv_scale: Tensor, *, fast_sums: bool
) -> None:
    """The same, written to a contiguous matrix."""
    if not a8_mk.is_cuda:
        out_mn.copy_((a8_mk.float() @ b8_nk.float().t()) * (a_inv_scale * b_inv_scale))
        return
    operands = (a8_mk, b8_nk.t(), a_inv_scale, b_inv_scale)

    def by_torch() -> None:
        torch._scaled_mm(*operands, out_dtype=out_mn.dtype, use_fast_accum=fast_sums, out=out_mn)

    if 2 * out_mn.numel() * a8_mk.shape[1] >= _WORTH_AN_FP8_CHOICE and library() is not None:
        key = (a8_mk.shape, b8_nk.shape, a8_mk.dtype, b8_nk.dtype, out_mn.dtype, fast_sums, a8_mk.device.index)
        if key not in _fp8_choices:
            _fp8_choices[key] = fastest_kernel(
                key[:-1],
                lambda: ScaledGemm(*operands[:2], out_mn, fast_sums=fast_sums),
                lambda gemm, kernel: gemm.run_scaled(kernel, *operands, out_mn),
                out_mn,
                by_torch,
            )
        choice = _fp8_choices[key]
        if choice is not None:
            gemm, kernel = choice
            gemm.run_scaled(kernel, *operands, out_mn)
            return
    by_torch()


def matmul_into(out_mn: Tensor, a_mk: Tensor, b_kn: Tensor) -> Tensor:
    """a · b, written to `out_mn`, with the bits of torch's own matmul."""
    if not _is_large(a_mk, b_kn, _WORTH_A_CHOICE) or not out_mn.is_contiguous():
        return torch.mm(a_mk, b_kn, out=out_mn)
    choice = _choice(a_mk, b_kn, out_mn, None)
    if choice is None:
        return torch.mm(a_mk, b_kn, out=out_mn)
    gemm, kernel = choice
    gemm.run(kernel, a_mk, b_kn, out_mn)
    return out_mn


def addmm_fused(a_mk: Tensor, b_kn: Tensor, added_mn: Tensor) -> Tensor:
    """a · b + added; if the GPU's library fuses both, the result is rounded only once."""
    if _is_large(a_mk, b_kn, _WORTH_A_SUM) and added_mn.is_contiguous():
        out_mn = torch.empty_like(added_mn)
        choice = _choice(a_mk, b_kn, out_mn, added_mn)
        if choice is not None:
            gemm, kernel = choice
            gemm.run(kernel, a_mk, b_kn, out_mn, added_mn)
            return out_mn
    return torch.mm(a_mk, b_kn).add_(added_mn)


def _is_large(a_mk: Tensor, b_kn: Tensor, operations: int) -> bool:
    if not a_mk.is_cuda or a_mk.dtype != torch.bfloat16 or 2 * a_mk.numel() * b_kn.shape[1] < operations:
        return False
    whole = all(side.is_contiguous() or side.t().is_contiguous() for side in (a_mk, b_kn))
    return whole and library() is not None


def _choice(a_mk: Tensor, b_kn: Tensor, out_mn: Tensor, added_mn: Tensor | None) -> tuple[Gemm, Any] | None:
    key = (a_mk.shape, b_kn.shape, a_mk.stride(), b_kn.stride(), a_mk.dtype, added_mn is None, a_mk.device.index)
    if key not in _choices:

        def run(gemm: Gemm, kernel: Any) -> None:
            gemm.run(kernel, a_mk, b_kn, out_mn, added_mn)

        def by_torch() -> None:
            torch.mm(a_mk, b_kn, out=out_mn)

        plain = by_torch if added_mn is None else None
        _choices[key] = fastest_kernel(key[:-1], lambda: Gemm(a_mk, b_kn, out_mn), run, out_mn, plain)
    return _choices[key]


def matmul_add(left_btk: Tensor, weight_dk: Tensor, residual_btd: Tensor) -> Tensor:
    """residual + left · weightᵀ."""
    stream_md: Tensor = _MatmulAdd.apply(left_btk.flatten(0, -2), weight_dk, residual_btd.flatten(0, -2))  # type: ignore[no-untyped-call]
    return stream_md.view_as(residual_btd)


class _MatmulAdd(torch.autograd.Function):
    """The gradient of the sum is the gradient of both sides."""

    @staticmethod
    def forward(ctx: Any, left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:
        ctx.save_for_backward(left_mk if ctx.needs_input_grad[1] else None, weight_dk)
        stream_md: Tensor = matmul_add_forward(left_mk, weight_dk, residual_md)
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


def lora_matmul(
    x_btk: Tensor, weight_dk: Tensor, lora_a_rk: Tensor, lora_b_dr: Tensor, bias_d: Tensor | None
) -> Tensor:
    """x · (weight + lora_b · lora_a)ᵀ + bias for a frozen weight.

    The large matmuls of both passes add the adapters' part in their epilogues.
    """
    out_md: Tensor = _LoraMatmul.apply(x_btk.flatten(0, -2), weight_dk, lora_a_rk, lora_b_dr, bias_d)  # type: ignore[no-untyped-call]
    return out_md.view(*x_btk.shape[:-1], -1)


class _LoraMatmul(torch.autograd.Function):
    """Without it autograd would add two whole gradients of the input."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight_dk: Tensor, lora_a_rk: Tensor, lora_b_dr: Tensor, bias_d: Tensor | None
    ) -> Tensor:
        inner_mr = F.linear(x_mk, lora_a_rk)
        ctx.save_for_backward(x_mk, weight_dk, lora_a_rk, lora_b_dr, inner_mr)
        out_md: Tensor = matmul_add_forward(x_mk, weight_dk, F.linear(inner_mr, lora_b_dr, bias_d))
        return out_md

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_mk, weight_dk, lora_a_rk, lora_b_dr, inner_mr = ctx.saved_tensors
        (d_out_md,) = gradients
        d_inner_mr = torch.mm(d_out_md, lora_b_dr)
        d_x_mk = None
        if ctx.needs_input_grad[0]:
            d_x_mk = matmul_add_forward(d_out_md, weight_dk.t(), torch.mm(d_inner_mr, lora_a_rk))
        return d_x_mk, None, torch.mm(d_inner_mr.t(), x_mk), torch.mm(d_out_md.t(), inner_mr), None


def grad_placeholder(x_mk: Tensor, weight_dk: Tensor) -> Tensor:
    """Stands for an output [m, d] in the autograd graph before it is computed; it holds no data."""
    return x_mk.new_empty(()).expand(x_mk.shape[0], weight_dk.shape[0])


def output_matmul(
    placeholder_md: Tensor, left_mk: Tensor, weight_dk: Tensor, bias_d: Tensor | None, residual_md: Tensor | None
) -> Tensor:
    """left · weightᵀ with a bias or a residual, where the operator before it also computes this matmul's gradients.

    `placeholder_md` comes from that operator and receives this output's gradient. Nothing is saved for the backward
    pass, so full recomputation stops before this matmul.
    """
    output_md: Tensor = _OutputMatmul.apply(placeholder_md, left_mk, weight_dk.detach(), bias_d, residual_md)  # type: ignore[no-untyped-call]
    return output_md


class _OutputMatmul(torch.autograd.Function):
    """Passes its gradient to the placeholder."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 - nothing is saved
        placeholder_md: Tensor,  # noqa: ARG004 - stands for the output
        left_mk: Tensor,
        weight_dk: Tensor,
        bias_d: Tensor | None,
        residual_md: Tensor | None,
    ) -> Tensor:
        if residual_md is None:
            return F.linear(left_mk, weight_dk, bias_d)
        stream_md: Tensor = matmul_add_forward(left_mk, weight_dk, residual_md)
        return stream_md

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (d_out_md,) = gradients
        *_, by_bias, by_residual = ctx.needs_input_grad
        return d_out_md, None, None, d_out_md.sum(0) if by_bias else None, d_out_md if by_residual else None


@torch.library.custom_op("keepstep::matmul_add_forward", mutates_args=())
def matmul_add_forward(left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:
    """residual + left · weightᵀ."""
    return addmm_fused(left_mk, weight_dk.t(), residual_md)


@matmul_add_forward.register_fake
def _(left_mk: Tensor, weight_dk: Tensor, residual_md: Tensor) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(residual_md)
