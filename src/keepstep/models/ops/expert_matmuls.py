"""The matmuls of experts, SwiGLU inside: our kernels on Hopper GPUs (`kernels/grouped_gemm.py`), else grouped matmuls.

None of them is differentiable: `routed_experts` puts them together.

Shape legend: m rows sorted by expert, d hidden, e experts, f width of an expert; n and k as in leftᵀ · right, [n, k].
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


def _fuses(rows: Tensor, gate_up_shape: tuple[int, ...]) -> bool:
    return rows.is_cuda and grouped_gemm.can_multiply(rows, gate_up_shape)


def _gate_up_shape(down: Tensor) -> tuple[int, int, int]:
    e, d, f = down.shape
    return e, 2 * f, d
