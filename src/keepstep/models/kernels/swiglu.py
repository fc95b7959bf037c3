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


@triton.jit
def _places(width, block: tl.constexpr):
    """Where a run of products lies in the output, its gates and ups in the fused input, and which of them exist."""
    group = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    gate = group * (2 * width) + lanes
    return group * width + lanes, gate, gate + width, lanes < width


@triton.jit
def _raise_to(largest, value):
    """Keep the larger. Looking first spares nearly all programs the atomic operation, for which they would queue."""
    if value > tl.load(largest, volatile=True):
        tl.atomic_max(largest, value)


@triton.jit
def _forward_kernel(fused, output, largest, width, with_largest: tl.constexpr, block: tl.constexpr):
    index, gate_place, up_place, inside = _places(width, block)
    gate = tl.load(fused + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + up_place, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + index, product.to(output.dtype.element_ty), mask=inside)
    if with_largest:
        _raise_to(largest, tl.max(tl.abs(product), 0))


@triton.jit
def _backward_kernel(gradient, fused, output, largest, width, with_largest: tl.constexpr, block: tl.constexpr):
    index, gate_place, up_place, inside = _places(width, block)
    dy = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(fused + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + up_place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = dy * gate * sigmoid
    tl.store(output + gate_place, d_gate.to(output.dtype.element_ty), mask=inside)
    tl.store(output + up_place, d_up.to(output.dtype.element_ty), mask=inside)
    if with_largest:
        _raise_to(largest, tl.maximum(tl.max(tl.abs(d_gate), 0), tl.max(tl.abs(d_up), 0)))


def swiglu_forward(fused_mf: Tensor, width: int, with_largest: bool) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of [..., 2f] in blocks of `width`, and the largest magnitude (0 where it was not asked for)."""
    output = fused_mf.new_empty(*fused_mf.shape[:-1], fused_mf.shape[-1] // 2)
    largest = torch.zeros((), dtype=torch.float32, device=fused_mf.device)
    grid = (output.numel() // width, triton.cdiv(width, _BLOCK))
    _forward_kernel[grid](fused_mf, output, largest, width, with_largest, _BLOCK, num_warps=4)
    return output, largest


def swiglu_backward(dy_mf: Tensor, fused_mf: Tensor, width: int, with_largest: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the fused input, and its largest magnitude."""
    output = torch.empty_like(fused_mf)
    largest = torch.zeros((), dtype=torch.float32, device=fused_mf.device)
    grid = (dy_mf.numel() // width, triton.cdiv(width, _BLOCK))
    _backward_kernel[grid](dy_mf, fused_mf, output, largest, width, with_largest, _BLOCK, num_warps=4)
    return output, largest
