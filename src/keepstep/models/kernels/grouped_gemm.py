"""The matmuls of experts on the tile machinery of gemm_tiles.cu: one launch for all experts, SwiGLU inside.

Shape legend: m rows sorted by expert, d hidden, e experts, f width of an expert; `ends_e` says where the rows of each
expert end and stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import TensorMap, relative_difference, tensor_map, works
from keepstep.models.kernels.gemm_tiles import COLUMNS, DEPTH, ROWS, THREADS, is_bf16_on_hopper, tile_kernel

_BOX_COLUMNS = 64
_PIECE_COLUMNS = 32
"""Of the sums that the gradient of a row's weight is added up from."""
_LEAST_SIZE = 512
"""A step for each piece of a tile."""
_MOST_NUMBERS = 8 << 31
"""31 bits count a tensor's eights."""


def can_multiply(rows: Tensor, gate_up_shape: Sequence[int]) -> bool:
    """Whether the kernels support experts with weights [e, 2f, d]: the same answer for all their matmuls."""
    experts, fused, hidden = gate_up_shape
    m, f = rows.shape[0], fused // 2
    whole = all(size % COLUMNS == 0 and size >= _LEAST_SIZE for size in (hidden, f))
    counted = max(m * max(fused, hidden), experts * fused * hidden) < _MOST_NUMBERS
    fit = whole and counted and m > 0 and is_bf16_on_hopper(rows)
    return fit and works("grouped_gemm", rows.device, _prove)


def expert_gate_up(x_md: Tensor, gate_up: Tensor, weight_m: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    """x · gate_upᵀ [m, 2f], first the gates, and silu(gate) × up × weight [m, f]."""
    (m, d), (e, n, _) = x_md.shape, gate_up.shape
    f = n // 2
    gate_up_mf, activation_mf = x_md.new_empty((m, n)), x_md.new_empty((m, f))
    # Runs of eight gates and their eight ups alternate, so that a thread's sums hold both factors of each product.
    sizes, strides = (d, 8, 2, f // 8, e), (d, f * d, 8 * d, n * d)
    right = tensor_map(gate_up, sizes, strides, (DEPTH, 8, 2, COLUMNS // 2 // 16, 1))
    outputs = weight_m, gate_up_mf, activation_mf
    _launch("expert_gate_up", _rows(x_md), right, *outputs, ends_e, e, n // COLUMNS, d // DEPTH, f)
    return gate_up_mf, activation_mf


def expert_down(activation_mf: Tensor, down: Tensor, ends_e: Tensor) -> Tensor:
    """activation · downᵀ, [m, d]."""
    e, d, f = down.shape
    out_md = activation_mf.new_empty((activation_mf.shape[0], d))
    right = _box(down.view(e * d, f), COLUMNS // 2)
    _launch("expert_down", _rows(activation_mf), right, out_md, ends_e, e, d // COLUMNS, f // DEPTH)
    return out_md


def expert_d_gate_up(
    d_out_md: Tensor, down: Tensor, gate_up_mf: Tensor, weight_m: Tensor, ends_e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `gate_up_mf`, the activation again, and the fp32 gradient of the weights."""
    (m, d), (e, _, f) = d_out_md.shape, down.shape
    d_gate_up_mf, activation_mf = torch.empty_like(gate_up_mf), gate_up_mf.new_empty((m, f))
    sums_pm = weight_m.new_empty((f // _PIECE_COLUMNS, m))
    maps = _rows(d_out_md), _box(down.view(e * d, f), DEPTH), _rows(gate_up_mf)
    tensors = weight_m, gate_up_mf, d_gate_up_mf, activation_mf, sums_pm, ends_e
    _launch("expert_d_gate_up", *maps, *tensors, e, f // COLUMNS, d // DEPTH, m)
    return d_gate_up_mf, activation_mf, sums_pm.sum(0)


def expert_dx(d_gate_up_mf: Tensor, gate_up: Tensor, ends_e: Tensor) -> Tensor:
    """d_gate_up · gate_up, [m, d]."""
    e, n, d = gate_up.shape
    dx_md = d_gate_up_mf.new_empty((d_gate_up_mf.shape[0], d))
    right = _box(gate_up.view(e * n, d), DEPTH)
    _launch("expert_dx", _rows(d_gate_up_mf), right, dx_md, ends_e, e, d // COLUMNS, n // DEPTH)
    return dx_md


def expert_outer(left_mn: Tensor, right_mk: Tensor, ends_e: Tensor) -> Tensor:
    """leftᵀ · right over the rows of each expert, [e, n, k]."""
    e, n, k = ends_e.shape[0], left_mn.shape[1], right_mk.shape[1]
    out = left_mn.new_empty((e, n, k))
    maps = _box(left_mn, DEPTH), _box(right_mk, DEPTH)
    _launch("expert_outer", *maps, out, ends_e, e, n // (2 * ROWS), k // COLUMNS)
    return out


def _box(matrix: Tensor, rows: int) -> TensorMap:
    height, width = matrix.shape
    return tensor_map(matrix, (width, height), (width,), (_BOX_COLUMNS, rows))


def _rows(left: Tensor) -> TensorMap:
    return _box(left, ROWS)


def _launch(name: str, *arguments: TensorMap | Tensor | int) -> None:
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device):
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Thread blocks work in pairs.
        tile_kernel(name, device).launch(processors // 2 * 2, THREADS, *arguments)


def _prove(device: torch.device) -> float:
    """Several tiles for each pair of thread blocks, steps no pieces divide, experts with no row, one row and many."""
    from keepstep.models.ops import expert_rows as reference
    from keepstep.models.ops.grouped_matmul import grouped_outer, loop_matmul

    random = torch.Generator(device).manual_seed(1)
    sizes, d, f = (300, 0, 1, 9000, 515, 64, 2000), 576 + 192, 512
    ends_e = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    m, e = sum(sizes), len(sizes)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=random) * scale).bfloat16()

    x_md, d_out_md, weight_m = draw(m, d), draw(m, d), torch.rand(m, device=device, generator=random) + 0.1
    gate_up, down = draw(e, 2 * f, d, scale=d**-0.5), draw(e, d, f, scale=f**-0.5)
    gate_up_mf, activation_mf = expert_gate_up(x_md, gate_up, weight_m, ends_e)
    back = expert_d_gate_up(d_out_md, down, gate_up_mf, weight_m, ends_e)
    others = expert_down(activation_mf, down, ends_e), expert_dx(back[0], gate_up, ends_e)
    gradients = expert_outer(back[0], x_md, ends_e), expert_outer(d_out_md, activation_mf, ends_e)
    d_activation_mf = loop_matmul(d_out_md, down.transpose(1, 2), ends_e)
    expected = [
        loop_matmul(x_md, gate_up, ends_e),
        reference.weighted_swiglu(gate_up_mf, weight_m),
        *reference.weighted_swiglu_backward(d_activation_mf, gate_up_mf, weight_m),
        loop_matmul(activation_mf, down, ends_e),
        loop_matmul(back[0], gate_up.transpose(1, 2), ends_e),
        grouped_outer(back[0], x_md, ends_e, has_kernel=False),
        grouped_outer(d_out_md, activation_mf, ends_e, has_kernel=False),
    ]
    return relative_difference((gate_up_mf, activation_mf, *back, *others, *gradients), expected)
