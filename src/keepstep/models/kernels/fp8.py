"""Numbers to fp8 with one scale for a tensor, written straight and transposed, without a bf16 copy of what is computed.

Hopper's fp8 matmuls need both operands contiguous along k, and backward multiplies the transposed ones. SwiGLU's are
transposed by a pass of their own: Triton 3.6 compiled a kernel that did both into one that mixed up columns (H200).

The scale depends on the largest magnitude of the whole tensor, so all numbers would be computed or read twice. Instead
three kernels run in turn. The first computes every n-th row and writes nothing. The second puts `HEADROOM` times the
largest magnitude of these rows at the end of the range, writes everything and finds the true largest magnitude. The
third ends immediately, unless that is past the end: then it writes everything again, with the true one at the end. In
the usual case up to three powers of two are lost at the bottom of the range (e4m3 has fifteen) and no precision. Small
tensors are measured whole. Results depend on the numbers alone, so they repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepstep.models.kernels.quantized import transpose_bytes

HEADROOM = 8.0
SAMPLED_ROWS = 512
"""A tensor of up to twice as many rows is measured whole."""
_TILE, _SWIGLU_TILE, _SWIGLU_BACKWARD_TILE = (128, 64, 8), (128, 64, 8), (64, 64, 8)
"""Rows, columns and warps of a program. With these a thread has 64 registers, so that half of the most threads run."""
_REPAIRS_PER_PROCESSOR = 4
"""Programs of the third kernel, which hardly ever has work."""

Launch = Callable[[str, int], None]
"""Starts a kernel for a phase on every n-th row."""


@triton.jit
def raise_to(largest, value):
    """Keep the larger. Looking first spares nearly all programs the atomic operation, for which they would queue.

    The last thing that a kernel does: threads may see different numbers here, and part. Barriers need them together.
    """
    if value > tl.load(largest, volatile=True):
        tl.atomic_max(largest, value)


@triton.jit
def _end_of_range(guess, largest, undo, headroom, highest, phase: tl.constexpr):
    """The magnitude that becomes the format's largest number, and 0 where a repair has nothing to do, else 1."""
    top = tl.maximum(tl.load(guess) * headroom, 1e-12)
    needed = 1
    if phase == "repair":
        found = tl.load(largest)
        needed = (found > top).to(tl.int32)
        top = tl.maximum(top, found)
    if phase != "sample":  # noqa: SIM102 - known when it is compiled, the other is not
        if tl.program_id(0) == 0:
            tl.store(undo, top / highest)
    return top, needed


@triton.jit
def _note(found, guess, largest, phase: tl.constexpr):
    """Raise what the phase finds, after all else."""
    if phase == "sample":
        raise_to(guess, found)
    if phase == "write":
        raise_to(largest, found)


@triton.jit
def _store(value, straight, places, inside, top, highest):
    # Saturate: a value past the largest number would become infinite, or no number at all.
    scaled = tl.minimum(tl.maximum(value * (highest / top), -highest), highest)
    small = scaled.to(straight.dtype.element_ty)
    tl.store(straight + places, small, mask=inside)
    return small


@triton.jit
def _store_both(
    value, straight, transposed, places, row, column, inside_row, inside_column, rows, top, highest
):  # fmt: skip
    small = _store(value, straight, places, inside_row[:, None] & inside_column[None, :], top, highest)
    transposed_places = column[:, None].to(tl.int64) * rows + row[None, :]
    tl.store(transposed + transposed_places, tl.trans(small), mask=inside_column[:, None] & inside_row[None, :])


@triton.jit
def _quantize_tile(
    tile, source, inverses, weight, straight, transposed, guess, largest, rows, columns, step, top, highest,
    normed: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(tl.cdiv(rows, step), tile_rows)
    row = (tile % row_tiles * tile_rows + tl.arange(0, tile_rows)) * step
    column = tile // row_tiles * tile_columns + tl.arange(0, tile_columns)
    inside_row, inside_column = row < rows, column < columns
    places = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(source + places, mask=inside_row[:, None] & inside_column[None, :], other=0.0).to(tl.float32)
    if normed:
        value *= tl.load(inverses + row, mask=inside_row, other=0.0)[:, None]
        value *= tl.load(weight + column, mask=inside_column, other=0.0).to(tl.float32)[None, :]
    found = tl.max(tl.abs(value))
    if phase != "sample":
        _store_both(value, straight, transposed, places, row, column, inside_row, inside_column, rows, top, highest)
    _note(found, guess, largest, phase)


@triton.jit
def _quantize_kernel(
    source, inverses, weight, straight, transposed, guess, largest, undo, rows, columns, step, headroom, highest,
    normed: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    top, tiles = _end_of_range(guess, largest, undo, headroom, highest, phase)
    tiles *= tl.cdiv(rows, tile_rows) * tl.cdiv(columns, tile_columns)
    if phase == "repair":
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _quantize_tile(
                tile, source, inverses, weight, straight, transposed, guess, largest, rows, columns, step, top, highest,
                normed, phase, tile_rows, tile_columns,
            )  # fmt: skip
    else:
        _quantize_tile(
            tl.program_id(0), source, inverses, weight, straight, transposed, guess, largest, rows, columns, step, top,
            highest, normed, phase, tile_rows, tile_columns,
        )  # fmt: skip


@triton.jit
def _swiglu_tile(
    tile, gradient, fused, straight, guess, largest, rows, width, blocks, step, top, highest,
    backward: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row_tiles, lane_tiles = tl.cdiv(tl.cdiv(rows, step), tile_rows), tl.cdiv(width, tile_columns)
    row = (tile % row_tiles * tile_rows + tl.arange(0, tile_rows)) * step
    lane = tile // row_tiles % lane_tiles * tile_columns + tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (lane < width)[None, :]
    block, wide_row = tile // row_tiles // lane_tiles, row[:, None].to(tl.int64)
    output = wide_row * (blocks * width) + (block * width + lane)[None, :]
    places = wide_row * (2 * blocks * width) + (block * (2 * width) + lane)[None, :]
    gate = tl.load(fused + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + places + width, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if backward:
        dy = tl.load(gradient + output, mask=inside, other=0.0).to(tl.float32)
        d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_up = dy * gate * sigmoid
        found = tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)))
        if phase != "sample":
            _store(d_gate, straight, places, inside, top, highest)
            _store(d_up, straight, places + width, inside, top, highest)
    else:
        product = gate * sigmoid * up
        found = tl.max(tl.abs(product))
        if phase != "sample":
            _store(product, straight, output, inside, top, highest)
    _note(found, guess, largest, phase)


@triton.jit
def _swiglu_kernel(
    gradient, fused, straight, guess, largest, undo, rows, width, blocks, step, headroom, highest,
    backward: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    top, tiles = _end_of_range(guess, largest, undo, headroom, highest, phase)
    tiles *= tl.cdiv(rows, tile_rows) * tl.cdiv(width, tile_columns) * blocks
    if phase == "repair":
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _swiglu_tile(
                tile, gradient, fused, straight, guess, largest, rows, width, blocks, step, top, highest,
                backward, phase, tile_rows, tile_columns,
            )  # fmt: skip
    else:
        _swiglu_tile(
            tl.program_id(0), gradient, fused, straight, guess, largest, rows, width, blocks, step, top, highest,
            backward, phase, tile_rows, tile_columns,
        )  # fmt: skip


def quantize(source: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`source` [rows, columns] as fp8, the same transposed, and the factor that undoes the scale.

    With `largest` that magnitude is at the end of the range, and what is past it saturates.
    """
    return _quantize(source, (None, None), dtype, largest)


def quantize_normed(stream: Tensor, inverses: Tensor, weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of the rows in e4m3; `largest` is the norm's largest magnitude."""
    return _quantize(stream, (inverses, weight), torch.float8_e4m3fn, largest)


def _quantize(
    source: Tensor, factors: tuple[Tensor | None, Tensor | None], dtype: torch.dtype, known: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, columns), normed = source.shape, factors[0] is not None
    straight = torch.empty(rows, columns, dtype=dtype, device=source.device)
    transposed = torch.empty(columns, rows, dtype=dtype, device=source.device)
    scale = _Scale(source.device, dtype, rows, known)

    def launch(phase: str, step: int) -> None:
        tile_rows, tile_columns, warps = _TILE
        tiles = triton.cdiv(triton.cdiv(rows, step), tile_rows) * triton.cdiv(columns, tile_columns)
        _quantize_kernel[scale.programs(tiles, phase)](
            source, *factors, straight, transposed, *scale.tensors, rows, columns, step, scale.headroom, scale.highest,
            normed, phase, tile_rows, tile_columns, num_warps=warps, num_stages=1,
        )  # fmt: skip

    scale.find(launch)
    return straight, transposed, scale.undo


def swiglu(fused: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) × up of [rows, 2f] in blocks of `width`, in e4m3, the same transposed, and what undoes the scale."""
    return _swiglu(None, fused, width, torch.float8_e4m3fn, _SWIGLU_TILE)


def swiglu_backward(gradient: Tensor, fused: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the fused input in e5m2, the same transposed, and what undoes the scale."""
    return _swiglu(gradient, fused, width, torch.float8_e5m2, _SWIGLU_BACKWARD_TILE)


def _swiglu(
    gradient: Tensor | None, fused: Tensor, width: int, dtype: torch.dtype, tile: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    rows, backward = fused.shape[0], gradient is not None
    blocks = fused.shape[1] // (2 * width)
    columns = fused.shape[1] if backward else blocks * width
    straight = torch.empty(rows, columns, dtype=dtype, device=fused.device)
    scale = _Scale(fused.device, dtype, rows, None)

    def launch(phase: str, step: int) -> None:
        tile_rows, tile_columns, warps = tile
        tiles = triton.cdiv(triton.cdiv(rows, step), tile_rows) * triton.cdiv(width, tile_columns) * blocks
        _swiglu_kernel[scale.programs(tiles, phase)](
            gradient, fused, straight, *scale.tensors, rows, width, blocks, step, scale.headroom, scale.highest,
            backward, phase, tile_rows, tile_columns, num_warps=warps, num_stages=1,
        )  # fmt: skip

    scale.find(launch)
    return straight, transpose_bytes(straight), scale.undo


class _Scale:
    """One tensor's scale, and the order of the kernels that find and use it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: int, known: Tensor | None) -> None:
        self.highest = torch.finfo(dtype).max
        self.undo = torch.empty((), dtype=torch.float32, device=device)
        guess, largest = torch.zeros(2, dtype=torch.float32, device=device) if known is None else (known, known)
        self.tensors = guess, largest, self.undo
        self._device, self._known = device, known is not None
        self._step = max(1, rows // SAMPLED_ROWS)
        self.headroom = 1.0 if self._known or self._step == 1 else HEADROOM

    def programs(self, tiles: int, phase: str) -> tuple[int]:
        """The grid of a phase."""
        if phase != "repair":
            return (tiles,)
        processors: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        return (min(tiles, processors * _REPAIRS_PER_PROCESSOR),)

    def find(self, launch: Launch) -> None:
        """Start the kernels."""
        if not self._known:
            launch("sample", self._step)
        if self._known or self._step == 1:
            launch("known", 1)
        else:
            launch("write", 1)
            launch("repair", 1)
