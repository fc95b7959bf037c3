"""Cross-entropy and its gradient over logits in one kernel, in place.

One program a row. The first pass over the row finds the normaliser, the second overwrites the logits with their
gradient. A row of a 128k vocabulary is 256 KiB: the second pass finds it in the cache, and each logit travels to memory
and back once, if no more rows are under way than the cache holds. So programs are wide: one fills a multiprocessor.
Torch's own operators make five passes in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 16384
_WARPS = 32


@triton.jit
def _row_kernel(logits, targets, losses, row_stride, vocab, width, block: tl.constexpr, with_gradient: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, block)
    top = float("-inf")
    total = tl.zeros((block,), tl.float32)
    for start in range(0, vocab, block):
        places = start + lanes
        x = tl.load(logits + places, mask=places < vocab, other=float("-inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        # One maximum for the whole row so far: each logit then costs one exponential, not two.
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    normaliser = top + tl.log(tl.sum(total, 0))
    counts = target >= 0
    wanted = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, normaliser - wanted, 0.0))
    if with_gradient:
        tl.debug_barrier()
        for start in range(0, width, block):
            places = start + lanes
            x = tl.load(logits + places, mask=places < vocab, other=float("-inf"), eviction_policy="evict_first")
            gradient = tl.exp(x.to(tl.float32) - normaliser) - tl.where(places == target, 1.0, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            gradient = gradient.to(logits.dtype.element_ty)
            tl.store(logits + places, gradient, mask=places < width, eviction_policy="evict_first")


def cross_entropy_(logits_nv: Tensor, targets_n: Tensor, vocab: int, with_gradient: bool) -> Tensor:
    """Losses of every row in fp32, 0 where the target is negative; the logits become their own gradient.

    Columns from `vocab` on are padding: they take no part and get no gradient.
    """
    rows, width = logits_nv.shape
    losses_n = torch.empty(rows, dtype=torch.float32, device=logits_nv.device)
    _row_kernel[(rows,)](
        logits_nv, targets_n, losses_n, logits_nv.stride(0), vocab, width, _BLOCK, with_gradient, num_warps=_WARPS
    )
    return losses_n


@triton.jit
def _scale_kernel(tensor, factor, size, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(tensor + places, mask=places < size).to(tl.float32) * tl.load(factor)
    tl.store(tensor + places, x.to(tensor.dtype.element_ty), mask=places < size)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply by an fp32 device scalar, in place; torch's own operator reads bf16 one number at a time for this."""
    block = 4096
    _scale_kernel[(triton.cdiv(tensor.numel(), block),)](tensor, factor, tensor.numel(), block, num_warps=8)
