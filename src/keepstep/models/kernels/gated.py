"""Starting the kernels of gated.cu: the products of a gated feed-forward with the activation inside them.

Shape legend: m tokens, k hidden, f feed-forward width; a tensor [m, n = 2f] holds blocks of `width` gates' numbers,
then those of their ups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import Kernel, TensorMap, compile_source, tensor_map

_ROWS, _COLUMNS, _DEPTH, _STAGES = 128, 256, 64, 4
"""A tile of sums, how many numbers each step adds to them, and how many steps' numbers are fetched ahead."""
_PAIR = 2 * _ROWS
_THREADS = 384
_MULTIPLYING_WARPS, _PIECES_AHEAD, _STRIP_BYTES = 8, 2, 1024
_BARRIERS_BYTES = 512
_LEAST_HIDDEN = 512
"""A step for each piece of a tile."""


def fits(tokens: int, hidden: int, ffn: int, width: int) -> bool:
    """Whether tiles fill such products without a rest, and 31 bits count the eights of numbers of the widest tensor."""
    whole = tokens % _PAIR == 0 and hidden % _DEPTH == 0 and width % _COLUMNS == 0
    return whole and hidden >= _LEAST_HIDDEN and tokens * 2 * ffn // 8 < 1 << 31


def gated_forward(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of x · gate_upᵀ, and the slopes that `gated_backward` wants."""
    (m, k), n = x_mk.shape, gate_up_nk.shape[0]
    slopes_mn, product_mf = x_mk.new_empty((m, n)), x_mk.new_empty((m, n // 2))
    # Runs of eight gates and their eight ups take turns, so that a thread's sums hold both sides of what it multiplies.
    weights = tensor_map(
        gate_up_nk,
        (k, 8, 2, width // 8, n // (2 * width)),
        (k, width * k, 8 * k, 2 * width * k),
        (_DEPTH, 8, 2, _COLUMNS // 2 // 16, 1),
    )
    _start(x_mk, False, (weights, slopes_mn, product_mf), n // _COLUMNS, width, n // 2)
    return product_mf, slopes_mn


def gated_backward(d_out_mk: Tensor, down_kf: Tensor, slopes_mn: Tensor, width: int) -> Tensor:
    """The gradient of x · gate_upᵀ, from that of the whole feed-forward."""
    k, f = down_kf.shape
    d_fused_mn = torch.empty_like(slopes_mn)
    weights = tensor_map(down_kf, (f, k), (f,), (64, _DEPTH))
    rows = tensor_map(slopes_mn, (2 * f, slopes_mn.shape[0]), (2 * f,), (64, _ROWS))
    _start(d_out_mk, True, (weights, rows, slopes_mn, d_fused_mn), f // _COLUMNS, width, f)
    return d_fused_mn


def load(device: torch.device) -> None:
    """Compile both and put them on a GPU; raises `CudaError` where that cannot be."""
    with torch.cuda.device(device):
        _kernel(False, device), _kernel(True, device)


def _start(
    left_mk: Tensor, backward: bool, others: Sequence[TensorMap | Tensor], column_tiles: int, width: int, f: int
) -> None:
    m, k = left_mk.shape
    left = tensor_map(left_mk, (k, m), (k,), (_DEPTH, _ROWS))
    sizes = (m // _PAIR, column_tiles, k // _DEPTH, width, f // 8)
    with torch.cuda.device(left_mk.device):
        processors = torch.cuda.get_device_properties(left_mk.device).multi_processor_count
        # Blocks work in pairs.
        _kernel(backward, left_mk.device).launch(processors // 2 * 2, _THREADS, left, *others, *sizes)


@functools.cache
def _kernel(backward: bool, device: torch.device) -> Kernel:
    folder = Path(__file__).parent
    source = (folder / "tiles.cu").read_text() + (folder / "gated.cu").read_text()
    source = source.replace("@SUMS@", ", ".join(f"%{i}" for i in range(128)))
    source = source.replace("@OPERANDS@", ", ".join(f'"+f"(sums[{i}])' for i in range(128)))
    code = compile_source(source, [f"-DBACKWARD={int(backward)}"])
    stages_bytes = _STAGES * (_ROWS + _COLUMNS) * _DEPTH * 2
    # Gates and ups are handed over in strips of their own; what came back from the output is one strip.
    strips_bytes = _MULTIPLYING_WARPS * _PIECES_AHEAD * (1 if backward else 2) * _STRIP_BYTES
    return Kernel(code, "gated", stages_bytes + strips_bytes + _BARRIERS_BYTES, device)
