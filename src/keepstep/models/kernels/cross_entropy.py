"""Cross-entropy and its gradient over logits in one kernel, in place.

One program a row. The first pass over the row finds the normaliser, the second overwrites the logits with their
gradient. A row of a 128k vocabulary is 256 KiB: the second pass finds it in the cache, and each logit travels to memory
and back once, if no more rows are under way than the cache holds. So programs are wide: few fill a multiprocessor.
Torch's own operators make five passes in fp32.

For fp8 matmuls the second pass writes e5m2 to a matrix of its own; Hopper's tensor cores need a transposed copy too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepstep.models.kernels.cuda import relative_difference
from keepstep.models.kernels.quantized import transpose_bytes

_ROWS, _COLUMNS = (16, 8, 4), 4096
"""A tile of logits: the columns that all threads load in one go, and how many such loads may be in flight."""
_WARPS = 16
_NUMBERS_OF_A_LOAD = tl.constexpr(8)
"""In bf16: 16 bytes a thread."""
_PROOF_VOCABS = (2 * _ROWS[0] * _COLUMNS - 100, 3 * _ROWS[-1] * _COLUMNS - 100)
"""Two tiles of the most rows, and three of the fewest."""
_LOWEST = tl.constexpr(-1e30)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_kernel(
    logits, gradients, targets, losses, row_stride, gradient_stride, vocab, width,
    rows: tl.constexpr, columns: tl.constexpr, with_gradient: tl.constexpr, exponent: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    gradients += row * gradient_stride
    target = tl.load(targets + row)
    tile = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    # Maximum and sum of every column: no thread waits for another before the end, and one exponential a logit is
    # enough but for one a column and tile.
    top = tl.full((columns,), _LOWEST, tl.float32)
    total = tl.zeros((columns,), tl.float32)
    for start in range(0, vocab, rows * columns):
        places = start + tile
        x = tl.load(logits + places, mask=places < vocab, other=float("-inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - higher) * _LOG2_E)
        total += tl.sum(tl.exp2(x * _LOG2_E - (higher * _LOG2_E)[None, :]), 0)
        top = higher
    highest = tl.max(top, 0)
    normaliser = highest + tl.log(tl.sum(total * tl.exp2((top - highest) * _LOG2_E), 0))
    counts = target >= 0
    wanted = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, normaliser - wanted, 0.0))
    if with_gradient:
        tl.debug_barrier()
        # Nothing is left of a row that does not count when what is taken off is infinite.
        shift = tl.where(counts, normaliser * _LOG2_E - exponent, float("inf"))
        for start in range(0, width, rows * columns):
            places = start + tile
            x = tl.load(logits + places, mask=places < vocab, other=float("-inf"), eviction_policy="evict_first")
            gradient = tl.exp2(x.to(tl.float32) * _LOG2_E - shift).to(gradients.dtype.element_ty)
            # A thread writes what it read: with more numbers at a time threads would have to exchange them.
            written = gradients + tl.max_contiguous(places, [1, _NUMBERS_OF_A_LOAD])
            tl.store(written, gradient, mask=places < width, eviction_policy="evict_first")
        tl.debug_barrier()
        at_target = tl.exp2(wanted * _LOG2_E - shift) - 2.0**exponent
        tl.store(gradients + target, at_target.to(gradients.dtype.element_ty), mask=counts)


def cross_entropy_(logits_nv: Tensor, targets_n: Tensor, vocab: int, with_gradient: bool) -> Tensor:
    """Losses of every row in fp32, 0 where the target is negative; the logits become their own gradient.

    Columns from `vocab` on are padding: they take no part and get no gradient.
    """
    return _launch(logits_nv, logits_nv, targets_n, vocab, with_gradient, 0)


def cross_entropy_fp8(logits_nv: Tensor, targets_n: Tensor, vocab: int, exponent: int) -> tuple[Tensor, Tensor]:
    """Losses as above, and the gradient in e5m2, 2 to the power of `exponent` times as large; the logits stay."""
    gradient8_nv = torch.empty_like(logits_nv, dtype=torch.float8_e5m2)
    losses_n = _launch(logits_nv, gradient8_nv, targets_n, vocab, True, exponent)
    return losses_n, gradient8_nv


def _launch(
    logits_nv: Tensor, gradient_nv: Tensor, targets_n: Tensor, vocab: int, with_gradient: bool, exponent: int
) -> Tensor:
    rows, width = logits_nv.shape
    losses_n = torch.empty(rows, dtype=torch.float32, device=logits_nv.device)
    _row_kernel[(rows,)](
        logits_nv, gradient_nv, targets_n, losses_n, logits_nv.stride(0), gradient_nv.stride(0), vocab, width,
        _tile_rows(vocab), _COLUMNS, with_gradient, exponent, num_warps=_WARPS,
    )  # fmt: skip
    return losses_n


def _tile_rows(vocab: int) -> int:
    """As many as possible, unless fewer leave less of the last tile empty: it is computed all the same."""
    return min(_ROWS, key=lambda rows: -vocab % (rows * _COLUMNS))


@triton.jit
def _scale_kernel(tensor, factor, size, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(tensor + places, mask=places < size).to(tl.float32) * tl.load(factor)
    tl.store(tensor + places, x.to(tensor.dtype.element_ty), mask=places < size)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply by an fp32 device scalar, in place; torch's own operator reads bf16 one number at a time for this."""
    block = 4096
    _scale_kernel[(triton.cdiv(tensor.numel(), block),)](tensor, factor, tensor.numel(), block, num_warps=8)


def prove(device: torch.device) -> float:
    """How far losses, gradients and scaled ones are from torch's, with tiles, padding and targets to skip."""
    parts: list[tuple[Tensor, Tensor]] = []
    for logits, targets, vocab in map(_proof, _PROOF_VOCABS):
        losses, gradient = _expected(logits, targets, vocab)
        ours, factor = logits.to(device, copy=True), torch.full((), 0.25, device=device)
        seen = cross_entropy_(ours.clone(), targets.to(device), vocab, with_gradient=False)
        found = cross_entropy_(ours, targets.to(device), vocab, with_gradient=True)
        parts += [(found.cpu(), losses), (seen.cpu(), losses), (ours.cpu().clone(), gradient)]
        scale_(ours, factor)
        # The gradient at the targets is near -1 and would hide that of all other tokens.
        others = gradient.clamp(min=0)
        parts += [(ours.cpu(), gradient * 0.25), (ours.cpu().clamp(min=0), others * 0.25)]
    return relative_difference(*zip(*parts, strict=True))


def prove_fp8(device: torch.device) -> float:
    """The same of gradients in fp8 and of their transposed copy."""
    logits, targets, vocab = _proof(_PROOF_VOCABS[0])
    losses, gradient = _expected(logits, targets, vocab)
    exponent = 15
    small = (gradient * 2**exponent).to(torch.float8_e5m2).float()
    found, ours = cross_entropy_fp8(logits.to(device), targets.to(device), vocab, exponent)
    transposed = transpose_bytes(ours).cpu().float()
    parts = [(found.cpu(), losses), (ours.cpu().float(), small), (transposed.t(), small)]
    parts += [(ours.cpu().float().clamp(min=0), small.clamp(min=0))]
    return relative_difference(*zip(*parts, strict=True))


def _proof(vocab: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(4, vocab + 28, generator=generator)).bfloat16()
    return logits, torch.tensor([5, -100, vocab - 1, _COLUMNS]), vocab


def _expected(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Losses and gradients by torch's operators."""
    counts = targets >= 0
    chances = logits[:, :vocab].float().softmax(1)
    losses = -chances.gather(1, targets.clamp(min=0)[:, None]).squeeze(1).log() * counts
    gradient = (chances - torch.nn.functional.one_hot(targets.clamp(min=0), vocab)) * counts[:, None]
    return losses, torch.nn.functional.pad(gradient, (0, logits.shape[1] - vocab))
