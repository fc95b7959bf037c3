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
_RUN = 128
"""Bytes of a step: rows of an expert in fp8, transposed, begin at a multiple of it."""
_MOST_NUMBERS = 8 << 31
"""31 bits count a tensor's eights."""

Scales = tuple[Tensor, Tensor]
"""What undoes the scales of fp8 numbers, fp32: of each row of the left side, and of each expert's weights."""
_NO_SCALES = None, None


def can_multiply(rows: Tensor, gate_up_shape: Sequence[int]) -> bool:
    """Whether the kernels support experts with weights [e, 2f, d]: the same answer for all their matmuls."""
    return _fit(rows, gate_up_shape) and works("grouped_gemm", rows.device, _prove)


def can_multiply_fp8(rows: Tensor, gate_up_shape: Sequence[int]) -> bool:
    """The same for fp8 numbers; `rows` is what becomes of them, bf16."""
    return _fit(rows, gate_up_shape) and works("grouped_gemm_fp8", rows.device, _prove_fp8)


def _fit(rows: Tensor, gate_up_shape: Sequence[int]) -> bool:
    experts, fused, hidden = gate_up_shape
    m, f = rows.shape[0], fused // 2
    whole = hidden % COLUMNS == 0 == f % COLUMNS and hidden >= _LEAST_SIZE and f >= _LEAST_SIZE
    counted = max(m * max(fused, hidden), experts * fused * hidden) < _MOST_NUMBERS
    return whole and counted and m > 0 and is_bf16_on_hopper(rows)


def expert_gate_up(
    x_md: Tensor, gate_up: Tensor, weight_m: Tensor, ends_e: Tensor, scales: Scales | None = None
) -> tuple[Tensor, Tensor]:
    """x · gate_upᵀ [m, 2f], first the gates, and silu(gate) × up × weight [m, f]."""
    left, right = _words(x_md), _words(gate_up)
    (m, words), (e, n, _), f = left.shape, gate_up.shape, gate_up.shape[1] // 2
    gate_up_mf, activation_mf = _new(x_md, m, n), _new(x_md, m, f)
    # Runs of eight gates and their eight ups alternate, so that a thread's sums hold both factors of each product.
    sizes, strides = (words, 8, 2, f // 8, e), (words, f * words, 8 * words, n * words)
    weights = tensor_map(right, sizes, strides, (DEPTH, 8, 2, COLUMNS // 2 // 16, 1))
    others = weight_m, gate_up_mf, activation_mf, *(scales or _NO_SCALES), ends_e
    name = "expert_gate_up_fp8" if scales else "expert_gate_up"
    _launch(name, _rows(left), weights, *others, e, n // COLUMNS, words // DEPTH, f)
    return gate_up_mf, activation_mf


def expert_down(activation_mf: Tensor, down: Tensor, ends_e: Tensor) -> Tensor:
    """activation · downᵀ, [m, d]."""
    return _matmul("expert_down", activation_mf, down, ends_e, None)


def expert_matmul_fp8(left_mk: Tensor, right: Tensor, ends_e: Tensor, scales: Scales) -> Tensor:
    """left · rightᵀ with e4m3 right [e, n, k], and left in either fp8 format."""
    name = "expert_dx_fp8" if left_mk.dtype == torch.float8_e5m2 else "expert_matmul_fp8"
    return _matmul(name, left_mk, right, ends_e, scales)


def expert_d_gate_up(
    d_out_md: Tensor, down: Tensor, gate_up_mf: Tensor, weight_m: Tensor, ends_e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `gate_up_mf`, the activation again, and the fp32 gradient of the weights."""
    (m, d), e, f = d_out_md.shape, down.shape[0], gate_up_mf.shape[1] // 2
    d_gate_up_mf, activation_mf = torch.empty_like(gate_up_mf), _new(gate_up_mf, m, f)
    sums_pm = weight_m.new_empty((f // _PIECE_COLUMNS, m))
    maps = _rows(d_out_md), _box(down.flatten(0, 1), DEPTH), _rows(gate_up_mf)
    tensors = weight_m, gate_up_mf, d_gate_up_mf, activation_mf, sums_pm, ends_e
    _launch("expert_d_gate_up", *maps, *tensors, e, f // COLUMNS, d // DEPTH, down.shape[1], m)
    return d_gate_up_mf, activation_mf, sums_pm.sum(0)


def expert_dx(d_gate_up_mf: Tensor, gate_up: Tensor, ends_e: Tensor) -> Tensor:
    """d_gate_up · gate_up, [m, d]."""
    e, n, d = gate_up.shape
    dx_md = _new(d_gate_up_mf, d_gate_up_mf.shape[0], d)
    maps = _rows(d_gate_up_mf), _box(gate_up.flatten(0, 1), DEPTH)
    _launch("expert_dx", *maps, dx_md, *_NO_SCALES, ends_e, e, d // COLUMNS, n // DEPTH, n)
    return dx_md


def expert_outer(left_mn: Tensor, right_mk: Tensor, ends_e: Tensor) -> Tensor:
    """leftᵀ · right over the rows of each expert, [e, n, k]."""
    e, n, k = ends_e.shape[0], left_mn.shape[1], right_mk.shape[1]
    out = left_mn.new_empty((e, n, k))
    maps = _box(left_mn, DEPTH), _box(right_mk, DEPTH)
    _launch("expert_outer", *maps, out, ends_e, e, n // (2 * ROWS), k // COLUMNS)
    return out


def expert_outer_fp8(left_nr: Tensor, right_kr: Tensor, undo_e: Tensor, ends_e: Tensor, until_e: Tensor) -> Tensor:
    """left · rightᵀ over the numbers of each expert, [e, n, k]: one side e4m3, the other e5m2.

    Those of an expert end at `until_e`, zeros up to a multiple of 128 among them.
    """
    left, right, e = _words(left_nr), _words(right_kr), ends_e.shape[0]
    out = _new(left_nr, e, left.shape[0], right.shape[0])
    name = f"expert_outer_fp8_{'left' if left_nr.dtype == torch.float8_e5m2 else 'right'}_e5m2"
    maps = _rows(left), _box(right, COLUMNS // 2)
    _launch(name, *maps, out, undo_e, ends_e, until_e, e, out.shape[1] // (2 * ROWS), out.shape[2] // COLUMNS)
    return out


def _matmul(name: str, left_mk: Tensor, right: Tensor, ends_e: Tensor, scales: Scales | None) -> Tensor:
    e, n, _ = right.shape
    left = _words(left_mk)
    out_mn = _new(left_mk, left.shape[0], n)
    maps = _rows(left), _box(_words(right).flatten(0, 1), COLUMNS // 2)
    _launch(name, *maps, out_mn, *(scales or _NO_SCALES), ends_e, e, n // COLUMNS, left.shape[1] // DEPTH, n)
    return out_mn


def _words(tensor: Tensor) -> Tensor:
    """Two bytes at a time: tiles are copied in words, whatever is in them."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.view(torch.int16)


def _new(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.bfloat16)


def _box(matrix: Tensor, rows: int) -> TensorMap:
    height, width = matrix.shape
    return tensor_map(matrix, (width, height), (width,), (_BOX_COLUMNS, rows))


def _rows(left: Tensor) -> TensorMap:
    return _box(left, ROWS)


def _launch(name: str, *arguments: TensorMap | Tensor | int | None) -> None:
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device):
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Thread blocks work in pairs.
        tile_kernel(name, device).launch(processors // 2 * 2, THREADS, *arguments)


_PROOF = (300, 0, 1, 9000, 515, 64, 2000)
"""Rows of experts: several tiles for each pair of thread blocks."""


def _prove(device: torch.device) -> float:
    return difference_from_torch(device, _PROOF, 768, 512)


def _prove_fp8(device: torch.device) -> float:
    # More columns than are added up in one part, and so are the rows of one expert.
    return difference_in_fp8(device, _PROOF, 2304, 768)


def difference_from_torch(device: torch.device, sizes: Sequence[int], hidden: int, width: int) -> float:
    """The largest relative difference of the kernels from torch's operators, for experts with this many rows each."""
    from keepstep.models.ops import expert_rows as reference
    from keepstep.models.ops.grouped_matmul import grouped_outer, loop_matmul

    x_md, d_out_md, gate_up, down, weight_m, ends_e = _draw(device, sizes, hidden, width)
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


def difference_in_fp8(device: torch.device, sizes: Sequence[int], hidden: int, width: int) -> float:
    """The same for the kernels with fp8 numbers, next to matmuls of the same numbers in fp32."""
    from keepstep.models.ops import expert_rows as reference
    from keepstep.models.ops.grouped_matmul import grouped_outer, loop_matmul

    x_md, d_out_md, gate_up, _, weight_m, ends_e = _draw(device, sizes, hidden, width)
    row_m = torch.linspace(0.5, 2, len(weight_m), device=device)
    group_e = torch.linspace(0.02, 0.05, len(ends_e), device=device)
    counts_e = torch.diff(ends_e, prepend=ends_e.new_zeros(1))
    by_m1 = (row_m * group_e.repeat_interleave(counts_e))[:, None]
    x8_md, d8_md = x_md.to(torch.float8_e4m3fn), d_out_md.to(torch.float8_e5m2)
    gate_up8 = (gate_up * hidden**0.5).to(torch.float8_e4m3fn)
    # Each expert's rows, then zeros up to a multiple of 128.
    until_e = (-(-counts_e // _RUN) * _RUN).cumsum(0).to(torch.int32)
    moved_e = until_e - ends_e - -counts_e % _RUN
    place_m = torch.arange(len(row_m), device=device) + moved_e.repeat_interleave(counts_e)

    def runs(rows8_md: Tensor) -> Tensor:
        padded = rows8_md.new_zeros((int(until_e[-1]), hidden), dtype=torch.bfloat16)
        return padded.index_copy_(0, place_m, rows8_md.bfloat16()).t().to(rows8_md.dtype).contiguous()

    gate_up_mf, activation_mf = expert_gate_up(x8_md, gate_up8, weight_m, ends_e, (row_m, group_e))
    ours = [expert_matmul_fp8(left, gate_up8, ends_e, (row_m, group_e)) for left in (x8_md, d8_md)]
    for left, right in ((x8_md, d8_md), (d8_md, x8_md)):
        ours.append(expert_outer_fp8(runs(left), runs(right), group_e, ends_e, until_e))
    products = [loop_matmul(left.float(), gate_up8.float(), ends_e) * by_m1 for left in (x8_md, d8_md)]
    outer = grouped_outer(x8_md.float(), d8_md.float(), ends_e, has_kernel=False) * group_e[:, None, None]
    expected = [products[0], reference.weighted_swiglu(gate_up_mf, weight_m), *products, outer, outer.transpose(1, 2)]
    return relative_difference([gate_up_mf, activation_mf, *ours], expected)


def _draw(device: torch.device, sizes: Sequence[int], hidden: int, width: int) -> tuple[Tensor, ...]:
    random = torch.Generator(device).manual_seed(1)
    m, e = sum(sizes), len(sizes)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=random) * scale).bfloat16()

    rows = draw(m, hidden), draw(m, hidden)
    weights = draw(e, 2 * width, hidden, scale=hidden**-0.5), draw(e, hidden, width, scale=width**-0.5)
    weight_m = torch.rand(m, device=device, generator=random) + 0.1
    return *rows, *weights, weight_m, torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
