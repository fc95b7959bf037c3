"""Products by the machinery of tiles.cu: compiled with the file that says what becomes of their tiles, and started.

Shape legend: m rows, k what is summed over.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import Kernel, TensorMap, compile_source, is_hopper, source_of, tensor_map

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""A tile of sums, and how many numbers each step adds to them."""
_STAGES = 4
_PAIR = 2 * ROWS
_THREADS = 384
_MULTIPLYING_WARPS, _PIECES_AHEAD, _STRIP_BYTES = 8, 2, 1024
_BARRIERS_BYTES = 512
_LEAST_DEPTH = 8 * DEPTH
"""A step for each piece of a tile."""
_STRIPS = {"gated_forward": 2, "gated_backward": 1, "activated_forward": 2, "activated_backward": 1, "turned": 2}
"""By name of the function: strips that a piece is handed over in, as its `Finish` says."""


def fits(rows: int, depth: int, widest: int, left: Tensor) -> bool:
    """Whether a product's rows and sums fill tiles without a rest, on a GPU that has the instructions.

    `widest` are the numbers in a row of the widest tensor: 31 bits must count that tensor's eights.
    """
    if not left.is_cuda or left.dtype != torch.bfloat16:
        return False
    whole = rows % _PAIR == 0 and depth % DEPTH == 0 and depth >= _LEAST_DEPTH
    return whole and rows * widest // 8 < 1 << 31 and is_hopper(left.device)


def left_map(left_mk: Tensor) -> TensorMap:
    """The left side of a product."""
    m, k = left_mk.shape
    return tensor_map(left_mk, (k, m), (k,), (DEPTH, ROWS))


def right_map(right_nk: Tensor) -> TensorMap:
    """The right side, where it lies as [n, k]: two blocks fetch half a tile's columns each."""
    n, k = right_nk.shape
    return tensor_map(right_nk, (k, n), (k,), (DEPTH, COLUMNS // 2))


def start(
    file: str, name: str, left_mk: Tensor, others: Sequence[TensorMap | Tensor | None], column_tiles: int, *sizes: int
) -> None:
    """Run a kernel: its arguments are the left side's map, `others`, the sizes of the product, and `sizes`."""
    m, k = left_mk.shape
    with torch.cuda.device(left_mk.device):
        processors = torch.cuda.get_device_properties(left_mk.device).multi_processor_count
        kernel = _kernel(file, name, left_mk.device)
        # Blocks work in pairs.
        arguments = (left_map(left_mk), *others, m // _PAIR, column_tiles, k // DEPTH, *sizes)
        kernel.launch(processors // 2 * 2, _THREADS, *arguments)


@functools.cache
def _kernel(file: str, name: str, device: torch.device) -> Kernel:
    stages_bytes = _STAGES * (ROWS + COLUMNS) * DEPTH * 2
    strips_bytes = _MULTIPLYING_WARPS * _PIECES_AHEAD * _STRIPS[name] * _STRIP_BYTES
    return Kernel(
        compile_source(source_of("hopper", "tiles", file)), name, stages_bytes + strips_bytes + _BARRIERS_BYTES, device
    )
