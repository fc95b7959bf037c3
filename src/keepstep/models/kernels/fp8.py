"""Numbers to fp8 with one scale for a tensor, written straight and transposed, without a bf16 copy of what is computed.

Hopper's fp8 matmuls need both operands contiguous along k, and backward multiplies the transposed ones. A program
loads every fourth row as a tile of its own, so that a thread holds four rows of a column and packs them into a word.
Words are what is exchanged between threads. Triton exchanges single bytes one by one; in a kernel for SwiGLU it
also mixed up columns (3.6, H200).

The scale depends on the largest magnitude of the whole tensor, so all numbers would be computed or read twice. Instead
three kernels run in turn. The first computes every n-th row and writes nothing. The second puts `HEADROOM` times the
largest magnitude of these rows at the end of the range, writes everything and finds the true largest magnitude. The
third ends immediately, unless that is past the end: then it writes everything again, with the true one at the end. In
the usual case up to three powers of two are lost at the bottom of the range (e4m3 has fifteen) and no precision. Small
tensors are measured whole. Results depend on the numbers alone, so they repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADROOM = 8.0
SAMPLED_ROWS = 512
"""A tensor of up to twice as many rows is measured whole."""


class _Tile(NamedTuple):
    """What a program works on."""

    rows: int
    columns: int
    warps: int
    group: int
    """Tiles of rows in a band."""


_TILE, _SWIGLU_TILE, _SWIGLU_BACKWARD_TILE = _Tile(64, 128, 4, 8), _Tile(64, 64, 4, 8), _Tile(64, 64, 8, 8)
_REPAIRS_PER_PROCESSOR = 4
"""Programs of the third kernel, which hardly ever has work."""

_ZEROS = 64
"""Pairs of zeros that one kernel writes: one for each tensor would take as long as a sample."""
_zeros: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Those that nothing has written to yet, of every stream."""

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
def _tile_at(tile, row_tiles, column_tiles, group: tl.constexpr):
    """Bands of `group` tiles of rows, walked column by column: both outputs get long runs at about the same time.

    The last rows first: those that were just written are still in the cache, and the next matmul starts with the first.
    """
    first = tile // (group * column_tiles) * group
    band, place = tl.minimum(row_tiles - first, group), tile % (group * column_tiles)
    return row_tiles - 1 - first - place % band, place // band


@triton.jit
def _pack(a, b, c, d, e5m2: tl.constexpr):
    """Four numbers in fp8, the first in the lowest byte."""
    # From single bytes LLVM makes code that ptxas 12.8 crashes on.
    convert: tl.constexpr = "cvt.rn.satfinite.e5m2x2.f32" if e5m2 else "cvt.rn.satfinite.e4m3x2.f32"
    assembly: tl.constexpr = (
        "{ .reg .b16 low, high; " + convert + " low, $2, $1; " + convert + " high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    return tl.inline_asm_elementwise(assembly, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _inside(word_row, number: tl.constexpr, rows, inside_column):
    return (word_row * 4 + number < rows)[:, None] & inside_column[None, :]


@triton.jit
def _load_four(source, places, stride, word_row, rows, inside_column):
    """Four rows of each word. All are loaded before anything is written: the compiler would not exchange the two."""
    a = tl.load(source + places, mask=_inside(word_row, 0, rows, inside_column), other=0.0)
    b = tl.load(source + places + stride, mask=_inside(word_row, 1, rows, inside_column), other=0.0)
    c = tl.load(source + places + 2 * stride, mask=_inside(word_row, 2, rows, inside_column), other=0.0)
    d = tl.load(source + places + 3 * stride, mask=_inside(word_row, 3, rows, inside_column), other=0.0)
    return a, b, c, d


@triton.jit
def _largest(a, b, c, d):
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def _saturated(value, top, highest):
    # A value past the largest number would become infinite, or no number at all.
    return tl.minimum(tl.maximum(value * (highest / top), -highest), highest)


@triton.jit
def _write_four(
    a, b, c, d, straight, transposed, places, stride, word_row, column, rows, word_rows, inside_column, top, highest
):  # fmt: skip
    a, b = _saturated(a, top, highest), _saturated(b, top, highest)
    c, d = _saturated(c, top, highest), _saturated(d, top, highest)
    dtype: tl.constexpr = straight.dtype.element_ty
    tl.store(straight + places, a.to(dtype), mask=_inside(word_row, 0, rows, inside_column))
    tl.store(straight + places + stride, b.to(dtype), mask=_inside(word_row, 1, rows, inside_column))
    tl.store(straight + places + 2 * stride, c.to(dtype), mask=_inside(word_row, 2, rows, inside_column))
    tl.store(straight + places + 3 * stride, d.to(dtype), mask=_inside(word_row, 3, rows, inside_column))
    words = tl.trans(_pack(a, b, c, d, e5m2=dtype == tl.float8e5))
    transposed_places = column[:, None].to(tl.int64) * word_rows + word_row[None, :]
    tl.store(transposed + transposed_places, words, mask=inside_column[:, None] & (word_row < word_rows)[None, :])


@triton.jit
def _normed(value, inverses, weight, word_row, number: tl.constexpr, rows):
    row = word_row * 4 + number
    return value * tl.load(inverses + row, mask=row < rows, other=0.0)[:, None] * weight[None, :]


@triton.jit
def _quantize_tile(
    tile, source, inverses, weight, straight, transposed, guess, largest, rows, word_rows, columns, step, top, highest,
    normed: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    taken, stride = tl.cdiv(rows, step), step * columns
    row_tile, column_tile = _tile_at(tile, tl.cdiv(taken, tile_rows), tl.cdiv(columns, tile_columns), group)
    word_row = row_tile * (tile_rows // 4) + tl.arange(0, tile_rows // 4)
    column = column_tile * tile_columns + tl.arange(0, tile_columns)
    inside_column = column < columns
    places = (word_row * 4)[:, None].to(tl.int64) * stride + column[None, :]
    a, b, c, d = _load_four(source, places, stride, word_row, taken, inside_column)
    a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    if normed:
        factor = tl.load(weight + column, mask=inside_column, other=0.0).to(tl.float32)
        a, b = _normed(a, inverses, factor, word_row, 0, rows), _normed(b, inverses, factor, word_row, 1, rows)
        c, d = _normed(c, inverses, factor, word_row, 2, rows), _normed(d, inverses, factor, word_row, 3, rows)
    if phase != "sample":
        _write_four(
            a, b, c, d, straight, transposed, places, stride, word_row, column, rows, word_rows, inside_column, top,
            highest,
        )  # fmt: skip
    _note(tl.max(_largest(a, b, c, d)), guess, largest, phase)


@triton.jit
def _quantize_kernel(
    source, inverses, weight, straight, transposed, guess, largest, undo, rows, word_rows, columns, step, headroom,
    highest, normed: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
    group: tl.constexpr,
):  # fmt: skip
    top, tiles = _end_of_range(guess, largest, undo, headroom, highest, phase)
    tiles *= tl.cdiv(rows, tile_rows) * tl.cdiv(columns, tile_columns)
    # A loop of one round would take a third more registers.
    if phase == "repair":
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _quantize_tile(
                tile, source, inverses, weight, straight, transposed, guess, largest, rows, word_rows, columns, step,
                top, highest, normed, phase, tile_rows, tile_columns, group,
            )  # fmt: skip
    else:
        _quantize_tile(
            tl.program_id(0), source, inverses, weight, straight, transposed, guess, largest, rows, word_rows, columns,
            step, top, highest, normed, phase, tile_rows, tile_columns, group,
        )  # fmt: skip


@triton.jit
def _swiglu(gate, up):
    gate = gate.to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(tl.float32)


@triton.jit
def _swiglu_backward(gate, up, dy):
    gate, dy = gate.to(tl.float32), dy.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    return dy * up.to(tl.float32) * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid


@triton.jit
def _swiglu_tile(
    tile, gradient, fused, straight, transposed, guess, largest, rows, word_rows, width, blocks, step, top, highest,
    backward: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
    group: tl.constexpr,
):  # fmt: skip
    taken, stride, lane_tiles = tl.cdiv(rows, step), step * blocks * width, tl.cdiv(width, tile_columns)
    row_tile, column_tile = _tile_at(tile, tl.cdiv(taken, tile_rows), lane_tiles * blocks, group)
    word_row = row_tile * (tile_rows // 4) + tl.arange(0, tile_rows // 4)
    lane = column_tile % lane_tiles * tile_columns + tl.arange(0, tile_columns)
    column, inside_lane = column_tile // lane_tiles * width + lane, lane < width
    gate_column = column + column_tile // lane_tiles * width
    starts = (word_row * 4)[:, None].to(tl.int64) * stride
    output, places = starts + column[None, :], 2 * starts + gate_column[None, :]
    gate_a, gate_b, gate_c, gate_d = _load_four(fused, places, 2 * stride, word_row, taken, inside_lane)
    up_a, up_b, up_c, up_d = _load_four(fused, places + width, 2 * stride, word_row, taken, inside_lane)
    if backward:
        dy_a, dy_b, dy_c, dy_d = _load_four(gradient, output, stride, word_row, taken, inside_lane)
        a, up_a = _swiglu_backward(gate_a, up_a, dy_a)
        b, up_b = _swiglu_backward(gate_b, up_b, dy_b)
        c, up_c = _swiglu_backward(gate_c, up_c, dy_c)
        d, up_d = _swiglu_backward(gate_d, up_d, dy_d)
        found = tl.max(tl.maximum(_largest(a, b, c, d), _largest(up_a, up_b, up_c, up_d)))
        if phase != "sample":
            _write_four(
                a, b, c, d, straight, transposed, places, 2 * stride, word_row, gate_column, rows, word_rows,
                inside_lane, top, highest,
            )  # fmt: skip
            _write_four(
                up_a, up_b, up_c, up_d, straight, transposed, places + width, 2 * stride, word_row, gate_column + width,
                rows, word_rows, inside_lane, top, highest,
            )  # fmt: skip
    else:
        a, b, c, d = _swiglu(gate_a, up_a), _swiglu(gate_b, up_b), _swiglu(gate_c, up_c), _swiglu(gate_d, up_d)
        found = tl.max(_largest(a, b, c, d))
        if phase != "sample":
            _write_four(
                a, b, c, d, straight, transposed, output, stride, word_row, column, rows, word_rows, inside_lane, top,
                highest,
            )  # fmt: skip
    _note(found, guess, largest, phase)


@triton.jit
def _swiglu_kernel(
    gradient, fused, straight, transposed, guess, largest, undo, rows, word_rows, width, blocks, step, headroom,
    highest, backward: tl.constexpr, phase: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
    group: tl.constexpr,
):  # fmt: skip
    top, tiles = _end_of_range(guess, largest, undo, headroom, highest, phase)
    tiles *= tl.cdiv(rows, tile_rows) * tl.cdiv(width, tile_columns) * blocks
    if phase == "repair":
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _swiglu_tile(
                tile, gradient, fused, straight, transposed, guess, largest, rows, word_rows, width, blocks, step, top,
                highest, backward, phase, tile_rows, tile_columns, group,
            )  # fmt: skip
    else:
        _swiglu_tile(
            tl.program_id(0), gradient, fused, straight, transposed, guess, largest, rows, word_rows, width, blocks,
            step, top, highest, backward, phase, tile_rows, tile_columns, group,
        )  # fmt: skip


def quantize(source: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`source` [rows, columns] as fp8, the same transposed, and the factor that undoes the scale.

    With `largest` that magnitude is at the end of the range, and what is past it saturates.
    """
    return _launch_quantize(source, (None, None), dtype, largest)


def quantize_normed(stream: Tensor, inverses: Tensor, weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of the rows in e4m3; `largest` is the norm's largest magnitude."""
    return _launch_quantize(stream, (inverses, weight), torch.float8_e4m3fn, largest)


def _launch_quantize(
    source: Tensor, factors: tuple[Tensor | None, Tensor | None], dtype: torch.dtype, known: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, columns), normed, tile = source.shape, factors[0] is not None, _TILE
    target = _Target(source.device, dtype, (rows, columns), known)

    def launch(phase: str, step: int) -> None:
        tiles = triton.cdiv(triton.cdiv(rows, step), tile.rows) * triton.cdiv(columns, tile.columns)
        _quantize_kernel[target.programs(tiles, phase)](
            source, *factors, *target.tensors, rows, target.word_rows, columns, step, target.headroom, target.highest,
            normed, phase, tile.rows, tile.columns, tile.group, num_warps=tile.warps, num_stages=1,
        )  # fmt: skip

    return target.write(launch)


def swiglu(fused: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) × up of [rows, 2f] in blocks of `width`, in e4m3, the same transposed, and what undoes the scale."""
    return _launch_swiglu(None, fused, width, torch.float8_e4m3fn, _SWIGLU_TILE)


def swiglu_backward(gradient: Tensor, fused: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the fused input in e5m2, the same transposed, and what undoes the scale."""
    return _launch_swiglu(gradient, fused, width, torch.float8_e5m2, _SWIGLU_BACKWARD_TILE)


def _launch_swiglu(
    gradient: Tensor | None, fused: Tensor, width: int, dtype: torch.dtype, tile: _Tile
) -> tuple[Tensor, Tensor, Tensor]:
    rows, backward = fused.shape[0], gradient is not None
    blocks = fused.shape[1] // (2 * width)
    target = _Target(fused.device, dtype, (rows, fused.shape[1] if backward else blocks * width), None)

    def launch(phase: str, step: int) -> None:
        tiles = triton.cdiv(triton.cdiv(rows, step), tile.rows) * triton.cdiv(width, tile.columns) * blocks
        _swiglu_kernel[target.programs(tiles, phase)](
            gradient, fused, *target.tensors, rows, target.word_rows, width, blocks, step, target.headroom,
            target.highest, backward, phase, tile.rows, tile.columns, tile.group, num_warps=tile.warps, num_stages=1,
        )  # fmt: skip

    return target.write(launch)


def _two_zeros(device: torch.device) -> Tensor:
    # A graph that is being recorded must write its own, each time it runs.
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.float32, device=device)
    unused = _zeros.setdefault((device, torch.cuda.current_stream(device).cuda_stream), [])
    if not unused:
        # 16 bytes apart: Triton compiles a kernel of its own for other places.
        unused.extend(torch.zeros(_ZEROS, 4, dtype=torch.float32, device=device)[:, :2])
    return unused.pop()


class _Target:
    """A matrix in fp8, the same transposed as words of four numbers, their scale, and what finds and writes all."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], known: Tensor | None) -> None:
        (rows, columns), self.word_rows = sizes, triton.cdiv(sizes[0], 4)
        self.highest = torch.finfo(dtype).max
        self.straight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.words = torch.empty(columns, self.word_rows, dtype=torch.int32, device=device)
        self._undo = torch.empty((), dtype=torch.float32, device=device)
        guess, largest = _two_zeros(device) if known is None else (known, known)
        self.tensors = self.straight, self.words, guess, largest, self._undo
        self._device, self._known = device, known is not None
        self._step = max(1, rows // SAMPLED_ROWS)
        self.headroom = 1.0 if self._known or self._step == 1 else HEADROOM

    def programs(self, tiles: int, phase: str) -> tuple[int]:
        """The grid of a phase."""
        if phase != "repair":
            return (tiles,)
        processors: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        return (min(tiles, processors * _REPAIRS_PER_PROCESSOR),)

    def write(self, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
        """Start the kernels."""
        if not self._known:
            launch("sample", self._step)
        if self._known or self._step == 1:
            launch("known", 1)
        else:
            launch("write", 1)
            launch("repair", 1)
        # Without the rows that fill up the last words.
        transposed = self.words.view(self.straight.dtype)[:, : len(self.straight)].contiguous()
        return self.straight, transposed, self._undo
