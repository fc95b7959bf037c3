"""AdamW for fp32 weights kept as a bf16 half and a half of 16 more bits, and sums of gradients in fixed point.

AdamW is one pass over all tensors. It reads the gradient in whatever precision it came and applies the clipping factor
on the way. Nothing is read or written twice, and nothing is written where the factor is not a number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from keepstep.models.kernels.cuda import relative_difference

_BLOCK, _WARPS = 512, 4
_ADD_BLOCK = 4096


@triton.jit
def _adamw_kernel(
    high, low, gradient, first, second, factor, corrections, size, lr, decay, beta1, beta2, eps,
    block: tl.constexpr,
):  # fmt: skip
    # Four in a row for each thread. With eight, which the compiler would choose for two-byte numbers, the moments take
    # two loads with gaps each, and go through shared memory before they are stored.
    places = tl.max_contiguous(tl.program_id(0).to(tl.int64) * block + tl.arange(0, block), 4)
    exists = places < size
    scale = tl.load(factor)
    correction1, correction2 = tl.load(corrections), tl.load(corrections + 1)
    g = tl.load(gradient + places, mask=exists).to(tl.float32) * scale
    upper = tl.load(high + places, mask=exists).to(tl.int16, bitcast=True).to(tl.int32)
    w = ((upper << 16) + tl.load(low + places, mask=exists).to(tl.int32)).to(tl.float32, bitcast=True)
    m = tl.load(first + places, mask=exists)
    v = tl.load(second + places, mask=exists)
    # A step that must not count: a factor that is not a number equals nothing, not even itself. Only stores depend on
    # it: loads would wait for it.
    inside = exists & (scale == scale)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    w = w * (1 - lr * decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    bits = w.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    tl.store(high + places, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    tl.store(low + places, (bits - (upper << 16)).to(tl.int16), mask=inside)
    tl.store(first + places, m, mask=inside)
    tl.store(second + places, v, mask=inside)


def adamw_(
    halves: tuple[Tensor, Tensor],
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    factor: Tensor,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    corrections: Tensor,
) -> None:
    """One update, in place; none where `factor`, a device scalar that multiplies the gradient, is NaN.

    `corrections` are the two that Adam's moments are divided by, on the device too.
    """
    size = gradient.numel()
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        *halves, gradient, *moments, factor, corrections, size, lr, decay, *betas, eps, _BLOCK, num_warps=_WARPS
    )


@triton.jit
def _add_kernel(total, gradient, largest, size, scale, first: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    value = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    # Bits of positive floats order like integers, and a NaN is larger than all.
    tl.atomic_max(largest, tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0))
    whole = libdevice.rint(value * scale).to(tl.int64)
    if not first:
        whole += tl.load(total + places, mask=inside, other=0)
    tl.store(total + places, whole, mask=inside)


def add_fixed_point_(total: Tensor, gradient: Tensor, largest: Tensor, scale: float, first: bool) -> None:
    """Add round(gradient · scale) to an int64 `total`, or set it with `first`; raises the fp32 scalar `largest`."""
    size = total.numel()
    grid = (triton.cdiv(size, _ADD_BLOCK),)
    _add_kernel[grid](total, gradient, largest.view(torch.int32), size, scale, first, _ADD_BLOCK, num_warps=8)


def prove(device: torch.device) -> float:
    """How far one update, at a learning rate that moves weights visibly, and a fixed-point sum are from torch's."""
    random = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
    gradient, weight, first, second = random[0].bfloat16(), random[1].bfloat16(), random[2], random[3].abs()
    halves = weight.to(device, copy=True), torch.zeros(weight.shape, dtype=torch.int16, device=device)
    moments = first.to(device, copy=True), second.to(device, copy=True)
    factor, corrections = torch.full((), 0.5, device=device), torch.tensor([0.3, 0.1], device=device)
    adamw_(
        halves, gradient.to(device), moments, factor,
        lr=0.2, decay=0.4, betas=(0.9, 0.99), eps=1e-3, corrections=corrections,
    )  # fmt: skip
    scaled = gradient.float() * 0.5
    first, second = first.lerp(scaled, 0.1), second.lerp(scaled.square(), 0.01)
    moved = weight.float() * (1 - 0.2 * 0.4) - 0.2 * (first / 0.3) / ((second / 0.1).sqrt() + 1e-3)

    total = torch.zeros(gradient.shape, dtype=torch.int64, device=device)
    largest = torch.zeros((), device=device)
    for is_first in (True, False):
        add_fixed_point_(total, gradient.to(device), largest, 1024.0, is_first)
    summed = 2 * (gradient.float() * 1024).round()
    updated = [compare_halves(halves, moved), (moments[0].cpu(), first), (moments[1].cpu(), second)]
    sums = [(total.cpu(), summed), (largest.cpu(), gradient.float().abs().amax())]
    return relative_difference(*zip(*updated, *sums, strict=True))


def compare_halves(halves: tuple[Tensor, Tensor], expected: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in two halves and what it should be, both less what bf16 keeps of it: so the lower half counts."""
    high, low = (half.cpu() for half in halves)
    whole = ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
    kept = expected.bfloat16().float()
    return whole - kept, expected - kept
