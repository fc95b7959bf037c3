"""The matmuls of experts, SwiGLU inside: our kernels on Hopper GPUs (`kernels/grouped_gemm.py`), else grouped matmuls.

None of them is differentiable: `routed_experts` puts them together.

With _fp8, both sides are fp8 numbers: rows have a scale each, and so have the weights of each expert. The tensor cores
add them up with about 14 bits, which long sums do not tolerate (`linear.py` says how much). So the kernels add up 2048
products at a time, which may cost 0.4% of a sum, and round sums to bf16 in between.

Shape legend: m rows sorted by expert, r those rows with zeros after each expert's, d hidden, e experts, f width of an
expert; n and k as in leftᵀ · right, [n, k]; a trailing 8 is a tensor in fp8, and `undo` what its numbers are to be
multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.models.kernels import grouped_gemm
from keepstep.models.ops.backend import backend
from keepstep.models.ops.expert_rows import weighted_swiglu, weighted_swiglu_backward
from keepstep.models.ops.grouped_matmul import grouped_matmul, grouped_matmul_transposed, grouped_outer


@torch.library.custom_op("keepstep::expert_gate_up", mutates_args=())
def expert_gate_up(x_md: Tensor, gate_up: Tensor, weight_m: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    """x · gate_upᵀ [m, 2f], first the gates, and silu(gate) × up × weight [m, f]."""
    if _fuses(x_md, gate_up.shape) and weight_m.dtype == torch.float32:
        return grouped_gemm.expert_gate_up(x_md, gate_up, weight_m, ends_e)
    gate_up_mf = grouped_matmul(x_md, gate_up, ends_e, has_kernel=backend().has_grouped_matmul(x_md))
    return gate_up_mf, weighted_swiglu(gate_up_mf, weight_m)


@expert_gate_up.register_fake
def _(x_md: Tensor, gate_up: Tensor, weight_m: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    m, n = x_md.shape[0], gate_up.shape[1]
    return x_md.new_empty((m, n)), x_md.new_empty((m, n // 2))


@torch.library.custom_op("keepstep::expert_down", mutates_args=())
def expert_down(activation_mf: Tensor, down: Tensor, ends_e: Tensor) -> Tensor:
    """activation · downᵀ, [m, d]."""
    if _fuses(activation_mf, _gate_up_shape(down)):
        return grouped_gemm.expert_down(activation_mf, down, ends_e)
    return grouped_matmul(activation_mf, down, ends_e, has_kernel=backend().has_grouped_matmul(activation_mf))


@expert_down.register_fake
def _(activation_mf: Tensor, down: Tensor, ends_e: Tensor) -> Tensor:  # noqa: ARG001
    return activation_mf.new_empty((activation_mf.shape[0], down.shape[1]))


@torch.library.custom_op("keepstep::expert_d_gate_up", mutates_args=())
def expert_d_gate_up(
    d_out_md: Tensor, down: Tensor, gate_up_mf: Tensor, weight_m: Tensor, ends_e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the gates and ups, the activation again, and the gradient of the weights."""
    if _fuses(d_out_md, _gate_up_shape(down)) and weight_m.dtype == torch.float32:
        return grouped_gemm.expert_d_gate_up(d_out_md, down, gate_up_mf, weight_m, ends_e)
    has_kernel = backend().has_grouped_matmul(d_out_md)
    d_activation_mf = grouped_matmul_transposed(d_out_md, down, ends_e, has_kernel=has_kernel)
    results: tuple[Tensor, Tensor, Tensor] = weighted_swiglu_backward(d_activation_mf, gate_up_mf, weight_m)
    return results


@expert_d_gate_up.register_fake
def _(
    d_out_md: Tensor,
    down: Tensor,
    gate_up_mf: Tensor,
    weight_m: Tensor,
    ends_e: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    activation_mf = d_out_md.new_empty((d_out_md.shape[0], down.shape[2]))
    return torch.empty_like(gate_up_mf), activation_mf, torch.empty_like(weight_m)


@torch.library.custom_op("keepstep::expert_dx", mutates_args=())
def expert_dx(d_gate_up_mf: Tensor, gate_up: Tensor, ends_e: Tensor) -> Tensor:
    """d_gate_up · gate_up, [m, d]."""
    if _fuses(d_gate_up_mf, gate_up.shape):
        return grouped_gemm.expert_dx(d_gate_up_mf, gate_up, ends_e)
    has_kernel = backend().has_grouped_matmul(d_gate_up_mf)
    return grouped_matmul_transposed(d_gate_up_mf, gate_up, ends_e, has_kernel=has_kernel)


@expert_dx.register_fake
def _(d_gate_up_mf: Tensor, gate_up: Tensor, ends_e: Tensor) -> Tensor:  # noqa: ARG001
    return d_gate_up_mf.new_empty((d_gate_up_mf.shape[0], gate_up.shape[2]))


@torch.library.custom_op("keepstep::expert_outer", mutates_args=())
def expert_outer(left_mn: Tensor, right_mk: Tensor, ends_e: Tensor) -> Tensor:
    """leftᵀ · right over the rows of each expert, [e, n, k]: the gradient of weights."""
    if _fuses(left_mn, (ends_e.shape[0], 2 * left_mn.shape[1], right_mk.shape[1])):
        return grouped_gemm.expert_outer(left_mn, right_mk, ends_e)
    return grouped_outer(left_mn, right_mk, ends_e, has_kernel=backend().has_grouped_matmul(left_mn))


@expert_outer.register_fake
def _(left_mn: Tensor, right_mk: Tensor, ends_e: Tensor) -> Tensor:
    return left_mn.new_empty((ends_e.shape[0], left_mn.shape[1], right_mk.shape[1]))


@torch.library.custom_op("keepstep::expert_gate_up_fp8", mutates_args=())
def expert_gate_up_fp8(
    x8_md: Tensor, undo_m: Tensor, gate_up8: Tensor, undo_e: Tensor, weight_m: Tensor, ends_e: Tensor
) -> tuple[Tensor, Tensor]:
    """`expert_gate_up` of e4m3 numbers; both results are bf16."""
    if _fuses_fp8(x8_md, gate_up8.shape):
        return grouped_gemm.expert_gate_up(x8_md, gate_up8, weight_m, ends_e, (undo_m, undo_e))
    gate_up_mf = _scaled_matmul(x8_md, undo_m, gate_up8, undo_e, ends_e)
    return gate_up_mf, weighted_swiglu(gate_up_mf, weight_m)


@expert_gate_up_fp8.register_fake
def _(x8_md: Tensor, undo_m: Tensor, gate_up8: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    m, n = x8_md.shape[0], gate_up8.shape[1]
    return x8_md.new_empty((m, n), dtype=torch.bfloat16), x8_md.new_empty((m, n // 2), dtype=torch.bfloat16)


@torch.library.custom_op("keepstep::expert_matmul_fp8", mutates_args=())
def expert_matmul_fp8(left8_mk: Tensor, undo_m: Tensor, right8: Tensor, undo_e: Tensor, ends_e: Tensor) -> Tensor:
    """left · rightᵀ with e4m3 right [e, n, k]; the result is bf16."""
    if _fuses_fp8(left8_mk, _gate_up_shape(right8)):
        return grouped_gemm.expert_matmul_fp8(left8_mk, right8, ends_e, (undo_m, undo_e))
    return _scaled_matmul(left8_mk, undo_m, right8, undo_e, ends_e)


@expert_matmul_fp8.register_fake
def _(left8_mk: Tensor, undo_m: Tensor, right8: Tensor, *_others: Tensor) -> Tensor:  # noqa: ARG001
    return left8_mk.new_empty((left8_mk.shape[0], right8.shape[1]), dtype=torch.bfloat16)


@torch.library.custom_op("keepstep::expert_outer_fp8", mutates_args=())
def expert_outer_fp8(left8_nr: Tensor, right8_kr: Tensor, undo: Tensor, ends_e: Tensor, until_e: Tensor) -> Tensor:
    """left · rightᵀ over the rows of each expert, bf16 [e, n, k]: one side e4m3, the other e5m2."""
    e, n, k = ends_e.shape[0], left8_nr.shape[0], right8_kr.shape[0]
    if _fuses_fp8(left8_nr, (e, 2 * n, k)):
        return grouped_gemm.expert_outer_fp8(left8_nr, right8_kr, undo.expand(e).contiguous(), ends_e, until_e)
    left_rn, right_rk = left8_nr.bfloat16().t(), right8_kr.bfloat16().t()
    return grouped_outer(left_rn, right_rk, until_e, has_kernel=backend().has_grouped_matmul(left_rn)) * undo


@expert_outer_fp8.register_fake
def _(left8_nr: Tensor, right8_kr: Tensor, undo: Tensor, ends_e: Tensor, until_e: Tensor) -> Tensor:  # noqa: ARG001
    shape = ends_e.shape[0], left8_nr.shape[0], right8_kr.shape[0]
    return left8_nr.new_empty(shape, dtype=torch.bfloat16)


def _scaled_matmul(left8_mk: Tensor, undo_m: Tensor, right8: Tensor, undo_e: Tensor, ends_e: Tensor) -> Tensor:
    """What the kernels compute, in bf16, which holds every e4m3 number: sums are rounded before they are scaled."""
    left_mk, right = left8_mk.bfloat16(), right8.bfloat16()
    sums_mn = grouped_matmul(left_mk, right, ends_e, has_kernel=backend().has_grouped_matmul(left_mk))
    row_m = torch.arange(len(undo_m), device=ends_e.device, dtype=ends_e.dtype)
    return (sums_mn * (undo_m * undo_e[torch.searchsorted(ends_e, row_m, right=True)])[:, None]).bfloat16()


def _fuses_fp8(left8_mk: Tensor, gate_up_shape: tuple[int, ...]) -> bool:
    if not left8_mk.is_cuda:
        return False
    becomes = left8_mk.new_empty((left8_mk.shape[0], 0), dtype=torch.bfloat16)
    return grouped_gemm.can_multiply_fp8(becomes, gate_up_shape)


def _fuses(rows: Tensor, gate_up_shape: tuple[int, ...]) -> bool:
    return rows.is_cuda and grouped_gemm.can_multiply(rows, gate_up_shape)


def _gate_up_shape(down: Tensor) -> tuple[int, int, int]:
    e, d, f = down.shape
    return e, 2 * f, d
