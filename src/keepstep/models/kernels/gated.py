"""Starting the kernels of gated.cu: the products of a gated feed-forward with the activation inside them.

Shape legend: m tokens, k hidden, f feed-forward width; a fused tensor [m, 2f] holds blocks of `width` gates, then ups.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import Kernel, TensorMap, compile_source, tensor_map

_ROWS, _COLUMNS, _DEPTH, _STAGES = 128, 256, 64, 4
"""A tile of sums, how many numbers each step adds to them, and how many steps' numbers are fetched ahead."""
_PAIR = 2 * _ROWS
_PIECE_ROWS, _PIECE_COLUMNS = 64, 32
_THREADS = 384
_LEAST_HIDDEN = 1024
"""Two steps for each piece of a tile."""


def fits(tokens: int, hidden: int, width: int) -> bool:
    """Whether tiles fill such products without a rest."""
    return tokens % _PAIR == 0 and hidden % _DEPTH == 0 and hidden >= _LEAST_HIDDEN and width % _COLUMNS == 0


def gated_forward(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of x · gate_upᵀ, and that product itself."""
    (m, k), n = x_mk.shape, gate_up_nk.shape[0]
    fused_mn, product_mf = x_mk.new_empty((m, n)), x_mk.new_empty((m, n // 2))
    # Runs of eight gates and their eight ups take turns, so that a thread's sums hold both sides of what it multiplies.
    weights = tensor_map(
        gate_up_nk,
        (k, 8, 2, width // 8, n // (2 * width)),
        (k, width * k, 8 * k, 2 * width * k),
        (_DEPTH, 8, 2, _COLUMNS // 2 // 16, 1),
    )
    maps = (_left(x_mk), weights, _pieces(fused_mn), _pieces(product_mf))
    _start(x_mk, False, maps, n // _COLUMNS, width)
    return product_mf, fused_mn


def gated_backward(d_out_mk: Tensor, down_kf: Tensor, fused_mn: Tensor, width: int) -> Tensor:
    """The gradient of the fused product, from that of the whole feed-forward."""
    k, f = down_kf.shape
    d_fused_mn = torch.empty_like(fused_mn)
    weights = tensor_map(down_kf, (f, k), (f,), (64, _DEPTH))
    maps = (_left(d_out_mk), weights, _pieces(fused_mn), _pieces(d_fused_mn))
    _start(d_out_mk, True, maps, f // _COLUMNS, width)
    return d_fused_mn


def load(device: torch.device) -> None:
    """Compile both and put them on a GPU; raises `CudaError` where that cannot be."""
    with torch.cuda.device(device):
        _kernel(False, device), _kernel(True, device)


def _left(x_mk: Tensor) -> TensorMap:
    m, k = x_mk.shape
    return tensor_map(x_mk, (k, m), (k,), (_DEPTH, _ROWS))


def _pieces(x_mn: Tensor) -> TensorMap:
    m, n = x_mn.shape
    return tensor_map(x_mn, (n, m), (n,), (_PIECE_COLUMNS, _PIECE_ROWS))


def _start(left_mk: Tensor, backward: bool, maps: tuple[TensorMap, ...], column_tiles: int, width: int) -> None:
    m, k = left_mk.shape
    with torch.cuda.device(left_mk.device):
        kernel = _kernel(backward, left_mk.device)
        processors = torch.cuda.get_device_properties(left_mk.device).multi_processor_count
        # Blocks work in pairs.
        kernel.launch(processors // 2 * 2, _THREADS, maps, (m // _PAIR, column_tiles, k // _DEPTH, width))


@functools.cache
def _kernel(backward: bool, device: torch.device) -> Kernel:  # noqa: ARG001 - a kernel is loaded for one device
    source = (Path(__file__).parent / "gated.cu").read_text()
    # The 128 sums of a thread, as the instruction and the compiler want to see them.
    source = source.replace("@SUMS@", ", ".join(f"%{i}" for i in range(128)))
    source = source.replace("@OPERANDS@", ", ".join(f'"+f"(sums[{i}])' for i in range(128)))
    stages_bytes = _STAGES * (_ROWS + _COLUMNS) * _DEPTH * 2
    desks_bytes = 2 * (4 if backward else 3) * _PIECE_ROWS * _PIECE_COLUMNS * 2
    barriers_bytes = 256
    code = compile_source(source, [f"-DBACKWARD={int(backward)}"])
    return Kernel(code, "gated", stages_bytes + desks_bytes + barriers_bytes)
