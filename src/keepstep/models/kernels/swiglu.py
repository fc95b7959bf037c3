"""SwiGLU over the blocked layout of `gate_up`, forward and backward, each in one pass.

Inductor writes the backward of the split as a stack and reads every operand twice. The kernels can also find the
largest magnitude of what they write, which spares fp8 a pass over the widest tensors of the model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_GROUPS = 4
"""Runs of one width that a program works on."""


@triton.jit
def _places(count, width, groups: tl.constexpr, block: tl.constexpr):
    """Where products lie in the output, their gates and ups in the fused input, and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)[:, None]
    lanes = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    gate = group * (2 * width) + lanes
    return group * width + lanes, gate, gate + width, (lanes < width) & (group < count)


@triton.jit
def _raise_to(largest, value):
    """Keep the larger. Looking first spares nearly all programs the atomic operation, for which they would queue."""
    if value > tl.load(largest, volatile=True):
        tl.atomic_max(largest, value)


@triton.jit
def _forward_kernel(
    fused, output, largest, count, width, with_largest: tl.constexpr, groups: tl.constexpr, block: tl.constexpr
):
    index, gate_place, up_place, inside = _places(count, width, groups, block)
    gate = tl.load(fused + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + up_place, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + index, product.to(output.dtype.element_ty), mask=inside)
    if with_largest:
        _raise_to(largest, tl.max(tl.abs(product)))


@triton.jit
def _backward_kernel(
    gradient,
    fused,
    output,
    largest,
    count,
    width,
    with_largest: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
):
    index, gate_place, up_place, inside = _places(count, width, groups, block)
    dy = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(fused + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + up_place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = dy * gate * sigmoid
    tl.store(output + gate_place, d_gate.to(output.dtype.element_ty), mask=inside)
    tl.store(output + up_place, d_up.to(output.dtype.element_ty), mask=inside)
    if with_largest:
        _raise_to(largest, tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up))))


def swiglu_forward(fused_mf: Tensor, width: int, with_largest: bool) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of [..., 2f] in blocks of `width`, and the largest magnitude (0 where it was not asked for)."""
    output = fused_mf.new_empty(*fused_mf.shape[:-1], fused_mf.shape[-1] // 2)
    largest = torch.zeros((), dtype=torch.float32, device=fused_mf.device)
    count = output.numel() // width
    _forward_kernel[_grid(count, width)](
        fused_mf, output, largest, count, width, with_largest, _GROUPS, _BLOCK, num_warps=8
    )
    return output, largest


def swiglu_backward(dy_mf: Tensor, fused_mf: Tensor, width: int, with_largest: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the fused input, and its largest magnitude."""
    output = torch.empty_like(fused_mf)
    largest = torch.zeros((), dtype=torch.float32, device=fused_mf.device)
    count = dy_mf.numel() // width
    _backward_kernel[_grid(count, width)](
        dy_mf, fused_mf, output, largest, count, width, with_largest, _GROUPS, _BLOCK, num_warps=8
    )
    return output, largest


def _grid(count: int, width: int) -> tuple[int, int]:
    return triton.cdiv(count, _GROUPS), triton.cdiv(width, _BLOCK)
