"""Matmuls on the tile machinery of gemm_tiles.cu, each compiled with a file that holds its epilogue.

They are the matmuls of a feed-forward with SwiGLU (swiglu_mlp.cu) or GELU (gelu_mlp.cu) inside, and the projection to
queries, keys and values with rope inside (qkv_rope.cu). Those of experts are in grouped_gemm.py.

Shape legend: m tokens, k what is summed over (hidden), f feed-forward width; with SwiGLU a tensor [m, n = 2f] holds
blocks of `width` gates' numbers, then those of their ups. In the projection n are its rows, g key-value heads, r query
heads a key-value head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import (
    Kernel,
    TensorMap,
    compile_source,
    is_hopper,
    relative_difference,
    source_of,
    tensor_map,
    works,
)
from keepstep.models.ops.swiglu import activate, activate_backward
from keepstep.models.positions import apply_rope

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""A tile of sums, and how many numbers each step adds to them."""
_STAGES = 4
_PAIR = 2 * ROWS
THREADS = 384
_MULTIPLYING_WARPS, _PIECES_AHEAD, _STRIP_BYTES = 8, 2, 1024
_BARRIERS_BYTES = 512
_LEAST_DEPTH = 8 * DEPTH
"""A step for each piece of a tile."""
_ALIGNED_BYTES = 16
"""Of eight numbers that are read together: a part of a larger tensor may start anywhere."""
_ROPE_HEAD_SIZES = (64, 128)
TILE_KERNELS = {
    "swiglu_gemm_forward": ("swiglu_mlp", 2),
    "swiglu_gemm_backward": ("swiglu_mlp", 1),
    "gelu_gemm_forward": ("gelu_mlp", 2),
    "gelu_gemm_backward": ("gelu_mlp", 1),
    "qkv_rope_gemm_64": ("qkv_rope", 2),
    "qkv_rope_gemm_128": ("qkv_rope", 2),
    "expert_gate_up": ("grouped_gemm", 2),
    "expert_down": ("grouped_gemm", 2),
    "expert_d_gate_up": ("grouped_gemm", 1),
    "expert_dx": ("grouped_gemm", 1),
    "expert_outer": ("grouped_gemm", 1),
    "expert_gate_up_fp8": ("grouped_gemm", 2),
    "expert_matmul_fp8": ("grouped_gemm", 2),
    "expert_dx_fp8": ("grouped_gemm", 2),
    "expert_outer_fp8_left_e5m2": ("grouped_gemm", 2),
    "expert_outer_fp8_right_e5m2": ("grouped_gemm", 2),
}
"""By name of the function: its file, and the strips that a piece is handed over in, as its `Finish` says."""
_INPUTS_BYTES = {"swiglu_gemm_backward": 3 * 3 * 2048}
"""Shared memory of three warps for inputs that are read three units ahead, 2 KiB each."""


def fits(left_mk: Tensor, widest: int) -> bool:
    """Whether a matmul's rows and depth fill tiles exactly, on a GPU that has the instructions.

    `widest` are the numbers in a row of the widest tensor: 31 bits must count that tensor's eights.
    """
    rows, depth = left_mk.shape
    whole = rows % _PAIR == 0 and depth % DEPTH == 0 and depth >= _LEAST_DEPTH
    return whole and rows * widest // 8 < 1 << 31 and is_bf16_on_hopper(left_mk)


def is_bf16_on_hopper(left_mk: Tensor) -> bool:
    """Whether a GPU with the instructions holds numbers that the tiles are made of."""
    return left_mk.is_cuda and left_mk.dtype == torch.bfloat16 and is_hopper(left_mk.device)


def can_fuse_gelu(left_mk: Tensor, ffn: int) -> bool:
    """Whether the kernels support this matmul: the same answer for both directions of one feed-forward."""
    return fits(left_mk, ffn) and ffn % COLUMNS == 0 and works("gelu_mlp", left_mk.device, _prove_gelu)


def can_fuse_swiglu(left_mk: Tensor, ffn: int, width: int) -> bool:
    """Whether the kernels support this matmul: the same answer for both directions of one feed-forward."""
    fit = fits(left_mk, 2 * ffn) and width % COLUMNS == 0
    return fit and works("swiglu_mlp", left_mk.device, _prove_swiglu)


def can_fuse_rope(x_mk: Tensor, rows: int, head_size: int) -> bool:
    """Whether the kernel supports this projection."""
    shape = head_size in _ROPE_HEAD_SIZES and rows % COLUMNS == 0
    return shape and fits(x_mk, rows) and works(f"qkv_rope_{head_size}", x_mk.device, _ROPE_PROOFS[head_size])


def gelu_gemm_forward(x_mk: Tensor, up_fk: Tensor, bias_f: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:
    """GELU of x · upᵀ + bias, and the local gradients that `gelu_gemm_backward` needs."""
    m, f = x_mk.shape[0], up_fk.shape[0]
    activation_mf, saved_grad_mf = x_mk.new_empty((m, f)), x_mk.new_empty((m, f))
    if bias_f is not None and bias_f.data_ptr() % _ALIGNED_BYTES:
        bias_f = bias_f.clone()
    others = (_right_map(up_fk), bias_f, activation_mf, saved_grad_mf)
    _launch("gelu_gemm_forward", x_mk, others, f // COLUMNS, f // 8, int(by_tanh))
    return activation_mf, saved_grad_mf


def gelu_gemm_backward(d_out_mk: Tensor, down_kf: Tensor, saved_grad_mf: Tensor) -> Tensor:
    """The gradient of x · upᵀ + bias, from that of the whole feed-forward."""
    return _gemm_backward("gelu_gemm_backward", d_out_mk, down_kf, saved_grad_mf, down_kf.shape[1] // 8)


def swiglu_gemm_forward(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of x · gate_upᵀ, and the local gradients that `swiglu_gemm_backward` needs."""
    (m, k), n = x_mk.shape, gate_up_nk.shape[0]
    saved_grad_mn, activation_mf = x_mk.new_empty((m, n)), x_mk.new_empty((m, n // 2))
    # Runs of eight gates and their eight ups alternate, so that a thread's sums hold both factors of each product.
    sizes, strides = (k, 8, 2, width // 8, n // (2 * width)), (k, width * k, 8 * k, 2 * width * k)
    weights = tensor_map(gate_up_nk, sizes, strides, (DEPTH, 8, 2, COLUMNS // 2 // 16, 1))
    _launch("swiglu_gemm_forward", x_mk, (weights, saved_grad_mn, activation_mf), n // COLUMNS, width, n // 16)
    return activation_mf, saved_grad_mn


def swiglu_gemm_backward(d_out_mk: Tensor, down_kf: Tensor, saved_grad_mn: Tensor, width: int) -> Tensor:
    """The gradient of x · gate_upᵀ, from that of the whole feed-forward."""
    return _gemm_backward("swiglu_gemm_backward", d_out_mk, down_kf, saved_grad_mn, width, down_kf.shape[1] // 8)


def qkv_rope_gemm(
    x_mk: Tensor, weight_nk: Tensor, cosines: Tensor, sines: Tensor, queries_per_group: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [m, g·r·size], keys and values [m, g·size]; fp32 tables are for one row, or for all of them."""
    m, (n, k) = x_mk.shape[0], weight_nk.shape
    groups = n // size // (queries_per_group + 2)
    query = x_mk.new_empty((m, groups * queries_per_group * size))
    key, value = (x_mk.new_empty((m, groups * size)) for _ in range(2))
    # Runs of 32 rows of both halves of a head alternate, so that one piece of a tile holds what is rotated together.
    sizes, strides = (k, 32, 2, size // 64, n // size), (k, size // 2 * k, 32 * k, size * k)
    weights = tensor_map(weight_nk, sizes, strides, (DEPTH, 32, 2, size // 64, COLUMNS // 2 // size))
    table_rows = cosines.numel() // (size // 2)
    others = (weights, query, key, value, cosines, sines)
    _launch(f"qkv_rope_gemm_{size}", x_mk, others, n // COLUMNS, table_rows, queries_per_group, groups)
    return query, key, value


def _gemm_backward(name: str, d_out_mk: Tensor, down_kf: Tensor, saved_grad_mn: Tensor, *sizes: int) -> Tensor:
    (m, n), (k, f) = saved_grad_mn.shape, down_kf.shape
    d_up_mn = torch.empty_like(saved_grad_mn)
    weights = tensor_map(down_kf, (f, k), (f,), (64, DEPTH))
    rows = tensor_map(saved_grad_mn, (n, m), (n,), (64, ROWS))
    _launch(name, d_out_mk, (weights, rows, saved_grad_mn, d_up_mn), f // COLUMNS, *sizes)
    return d_up_mn


def _right_map(right_nk: Tensor) -> TensorMap:
    """The right side, stored as [n, k]: two thread blocks fetch half a tile's columns each."""
    n, k = right_nk.shape
    return tensor_map(right_nk, (k, n), (k,), (DEPTH, COLUMNS // 2))


def _launch(
    name: str, left_mk: Tensor, others: Sequence[TensorMap | Tensor | None], column_tiles: int, *sizes: int
) -> None:
    """Launch a kernel: its arguments are the left side's map, `others`, the sizes of the matmul, and `sizes`."""
    m, k = left_mk.shape
    with torch.cuda.device(left_mk.device):
        processors = torch.cuda.get_device_properties(left_mk.device).multi_processor_count
        kernel = tile_kernel(name, left_mk.device)
        left = tensor_map(left_mk, (k, m), (k,), (DEPTH, ROWS))
        # Thread blocks work in pairs.
        kernel.launch(processors // 2 * 2, THREADS, left, *others, m // _PAIR, column_tiles, k // DEPTH, *sizes)


@functools.cache
def tile_kernel(name: str, device: torch.device) -> Kernel:
    """One of `TILE_KERNELS`, compiled at first use."""
    file, strips = TILE_KERNELS[name]
    stages_bytes = _STAGES * (ROWS + COLUMNS) * DEPTH * 2
    strips_bytes = _MULTIPLYING_WARPS * _PIECES_AHEAD * strips * _STRIP_BYTES
    code = compile_source(source_of("hopper", "gemm_tiles", file))
    return Kernel(code, name, stages_bytes + strips_bytes + _BARRIERS_BYTES + _INPUTS_BYTES.get(name, 0), device)


def _feed_forward(device: torch.device, fused_rows: int) -> tuple[Tensor, ...]:
    """Inputs, gradient, weights and a bias: several tiles for each pair of thread blocks, steps no strips divide."""
    random = torch.Generator(device).manual_seed(1)
    m, k, f = 4608, 576, 2048

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=random) * scale).bfloat16()

    weights = draw(m, k), draw(m, k), draw(fused_rows * f, k, scale=k**-0.5), draw(k, f, scale=k**-0.5)
    return *weights, draw(f)


def _prove_gelu(device: torch.device) -> float:
    x_mk, d_out_mk, up_fk, down_kf, bias_f = _feed_forward(device, 1)
    wide_mf, dy_mf = torch.addmm(bias_f, x_mk, up_fk.t()), torch.mm(d_out_mk, down_kf)
    ours, expected = [], []
    for by_tanh, name in ((False, "none"), (True, "tanh")):
        activation_mf, saved_grad_mf = gelu_gemm_forward(x_mk, up_fk, bias_f, by_tanh)
        ours += [activation_mf, gelu_gemm_backward(d_out_mk, down_kf, saved_grad_mf)]
        backward = torch.ops.aten.gelu_backward(dy_mf, wide_mf, approximate=name)
        expected += [F.gelu(wide_mf, approximate=name), backward]
    return relative_difference(ours, expected)


def _prove_swiglu(device: torch.device) -> float:
    x_mk, d_out_mk, gate_up_nk, down_kf, _ = _feed_forward(device, 2)
    width = 512
    activation_mf, saved_grad_mn = swiglu_gemm_forward(x_mk, gate_up_nk, width)
    d_gate_up_mn = swiglu_gemm_backward(d_out_mk, down_kf, saved_grad_mn, width)
    gate_up_mn = torch.mm(x_mk, gate_up_nk.t())
    expected = activate(gate_up_mn, width), activate_backward(torch.mm(d_out_mk, down_kf), gate_up_mn, width)
    return relative_difference((activation_mf, d_gate_up_mn), expected)


def _prove_rope(device: torch.device, head_size: int, rows: int = 18, tokens: int = 512) -> float:
    """At a size that gives each pair of thread blocks several tiles, and steps that strips do not divide."""
    random = torch.Generator(device).manual_seed(1)
    k, groups, queries = 576, 256 // head_size, 4
    x_btk = torch.randn(rows, tokens, k, device=device, generator=random).bfloat16()
    weight = torch.randn(groups * (queries + 2) * head_size, k, device=device, generator=random) * k**-0.5
    angle = torch.rand(1, tokens, head_size // 2, device=device, generator=random) * tokens
    cos, sin = angle.cos(), angle.sin()
    ours = qkv_rope_gemm(x_btk.flatten(0, 1), weight.bfloat16(), cos, sin, queries, head_size)
    heads = torch.matmul(x_btk, weight.bfloat16().t()).unflatten(-1, (groups, queries + 2, head_size))
    expected = apply_rope(heads[..., :-2, :], cos, sin), apply_rope(heads[..., -2, :], cos, sin), heads[..., -1, :]
    return relative_difference(ours, [part.flatten(2).flatten(0, 1) for part in expected])


_ROPE_PROOFS = {size: functools.partial(_prove_rope, head_size=size) for size in _ROPE_HEAD_SIZES}
