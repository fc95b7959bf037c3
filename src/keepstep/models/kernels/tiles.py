"""Products by the machinery of tiles.cu: compiled with the file that says what becomes of their tiles, and started.

Shape legend: m rows, k what is summed over.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import CudaError, Kernel, TensorMap, compile_source, is_hopper, tensor_map

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""A tile of sums, and how many numbers each step adds to them."""
_STAGES = 4
_PAIR = 2 * ROWS
_THREADS = 384
_MULTIPLYING_WARPS, _PIECES_AHEAD, _STRIP_BYTES = 8, 2, 1024
_BARRIERS_BYTES = 512
_LEAST_DEPTH = 8 * DEPTH
"""A step for each piece of a tile."""
_STRIPS = {"gated_forward": 2, "gated_backward": 1, "turned": 2}
"""By name of the function: strips that a piece is handed over in, as its `Finish` says."""

_AGREED = 0.01
"""Both sides of a proof round to bf16, which is 0.004."""

_log = logging.getLogger(__name__)

Proof = Callable[[torch.device], float]


def fits(rows: int, depth: int, widest: int, left: Tensor) -> bool:
    """Whether a product's rows and sums fill tiles without a rest, on a GPU that has the instructions.

    `widest` are the numbers in a row of the widest tensor: 31 bits must count that tensor's eights.
    """
    if not left.is_cuda or left.dtype != torch.bfloat16:
        return False
    whole = rows % _PAIR == 0 and depth % DEPTH == 0 and depth >= _LEAST_DEPTH
    return whole and rows * widest // 8 < 1 << 31 and is_hopper(left.device)


@functools.cache
def works(file: str, device: torch.device, proof: Proof) -> bool:
    """Whether the kernels of a file run on a GPU, and right; asked once.

    `proof` computes something small with them and in torch's own operators, and gives the largest relative difference.
    A compiler or driver that nobody has met yet costs speed then, and nothing else.
    """
    try:
        with torch.cuda.device(device):
            for name in _names(file):
                _kernel(file, name, device)
            difference = proof(device)
    except (CudaError, OSError) as error:
        _log.warning("%s does without its kernels: %s", file, error)
        return False
    if not difference < _AGREED:
        _log.warning("%s does without its kernels: they are off by %.2g", file, difference)
    return difference < _AGREED


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of the pair of tensors that differ most; NaN where one has a NaN."""
    pairs = zip(ours, theirs, strict=True)
    parts = [(one.float() - other.float()).norm() / other.float().norm() for one, other in pairs]
    return torch.stack(parts).max().item()


def left_map(left_mk: Tensor) -> TensorMap:
    """The left side of a product."""
    m, k = left_mk.shape
    return tensor_map(left_mk, (k, m), (k,), (DEPTH, ROWS))


def right_map(right_nk: Tensor) -> TensorMap:
    """The right side, where it lies as [n, k]: two blocks fetch half a tile's columns each."""
    n, k = right_nk.shape
    return tensor_map(right_nk, (k, n), (k,), (DEPTH, COLUMNS // 2))


def start(
    file: str, name: str, left_mk: Tensor, others: Sequence[TensorMap | Tensor], column_tiles: int, *sizes: int
) -> None:
    """Run a kernel: its arguments are the left side's map, `others`, the sizes of the product, and `sizes`."""
    m, k = left_mk.shape
    with torch.cuda.device(left_mk.device):
        processors = torch.cuda.get_device_properties(left_mk.device).multi_processor_count
        kernel = _kernel(file, name, left_mk.device)
        # Blocks work in pairs.
        arguments = (left_map(left_mk), *others, m // _PAIR, column_tiles, k // DEPTH, *sizes)
        kernel.launch(processors // 2 * 2, _THREADS, *arguments)


def _names(file: str) -> list[str]:
    return [name for name in _STRIPS if name.startswith(file)]


@functools.cache
def _code(file: str) -> bytes:
    folder = Path(__file__).parent
    source = (folder / "tiles.cu").read_text() + (folder / f"{file}.cu").read_text()
    source = source.replace("@SUMS@", ", ".join(f"%{i}" for i in range(128)))
    return compile_source(source.replace("@OPERANDS@", ", ".join(f'"+f"(sums[{i}])' for i in range(128))))


@functools.cache
def _kernel(file: str, name: str, device: torch.device) -> Kernel:
    stages_bytes = _STAGES * (ROWS + COLUMNS) * DEPTH * 2
    strips_bytes = _MULTIPLYING_WARPS * _PIECES_AHEAD * _STRIPS[name] * _STRIP_BYTES
    return Kernel(_code(file), name, stages_bytes + strips_bytes + _BARRIERS_BYTES, device)
