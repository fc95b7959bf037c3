"""The output head and its cross-entropy, computed piece by piece so that all logits never exist at once.

Shape legend: b rows, t tokens, n tokens of one piece, d hidden, v rows of the head (vocabulary with padding).

With a vocabulary of 128k one row of 8192 tokens has 4 GiB of fp32 logits. Here each piece's gradient is computed right
after its loss, while its logits are at hand: nothing is computed twice and only one piece is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.models.products import multiply_into
from keepstep.models.triton_found import has_triton

NO_LOSS = -100
"""Target of a token that adds nothing to the loss."""
_CPU_PIECE_BYTES = 1 << 26
"""Logits of one piece on a CPU: small pieces stay near the caches."""
_GPU_SHARE = 16
"""One piece's logits may take this part of a GPU's memory: fewer pieces add up the head's gradient less often."""


class Head(nn.Module):
    """An output head with weights of its own [v, d]. Calling it is what lets FSDP gather them."""

    def __init__(self, hidden: int, rows: int, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)
        self.output: Callable[..., Tensor] = head_output
        """Tensor parallelism puts a form of its own here, for a slice of the rows."""

    def forward(self, hidden_btd: Tensor, targets_bt: Tensor | None = None, chunks: int = 0) -> Tensor:
        """Logits without targets, the sum of token losses with them."""
        return self.output(hidden_btd, self.weight, targets_bt, self.vocab, chunks)


def head_output(hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor | None, vocab: int, chunks: int) -> Tensor:
    """Logits [b, t, v] without targets, the sum of token losses (fp32 scalar) with them."""
    if targets_bt is None:
        return head_logits(hidden_btd, weight_vd, vocab)
    return head_loss(hidden_btd, weight_vd, targets_bt, vocab, chunks)


def head_logits(hidden_btd: Tensor, weight_vd: Tensor, vocab: int) -> Tensor:
    """Logits of every token; those of padding rows are the lowest number there is, so that they never win."""
    logits_btv = F.linear(hidden_btd, weight_vd)
    if weight_vd.shape[0] == vocab:
        return logits_btv
    padding_v = torch.arange(weight_vd.shape[0], device=logits_btv.device) >= vocab
    return logits_btv.masked_fill(padding_v, torch.finfo(logits_btv.dtype).min)


def head_loss(hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor, vocab: int, chunks: int = 0) -> Tensor:
    """Sum of the cross-entropy of all tokens whose target is not -100, in fp32.

    `chunks` pieces over tokens, 0 to choose by size. Products of matrices run in the precision of the inputs, softmax
    and sums in fp32. The gradient is computed with the loss, and only where gradients are on.
    """
    hidden_nd, targets_n = _counted(hidden_btd.flatten(0, 1), targets_bt.flatten())
    pieces = chunks or default_chunks(hidden_nd.shape[0], weight_vd.shape[0], hidden_nd)
    if torch.is_grad_enabled() and (hidden_nd.requires_grad or weight_vd.requires_grad):
        differentiable: Tensor = _ChunkedLoss.apply(hidden_nd, weight_vd, targets_n, vocab, pieces)  # type: ignore[no-untyped-call]
        return differentiable
    loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
    for piece_nd, piece_n in zip(hidden_nd.chunk(pieces), targets_n.chunk(pieces), strict=True):
        loss += _losses_only(piece_nd, weight_vd, piece_n, vocab).sum()
    return loss


def _counted(hidden_nd: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """On a CPU the tokens that have a target only: where the assistant alone is learnt, that is a fifth of them.

    A GPU takes them all, because counting them would make it wait.
    """
    if hidden_nd.device.type != "cpu" or _fused(hidden_nd):
        return hidden_nd, targets_n
    places_m = (targets_n != NO_LOSS).nonzero().squeeze(1)
    if 2 * places_m.numel() > targets_n.numel() or not places_m.numel():
        return hidden_nd, targets_n
    return hidden_nd.index_select(0, places_m), targets_n.index_select(0, places_m)


def default_chunks(tokens: int, rows: int, logits: Tensor) -> int:
    """Pieces that keep one piece's logits within what suits the device; `logits` gives device and precision."""
    if logits.is_cuda:
        room = torch.cuda.get_device_properties(logits.device).total_memory // _GPU_SHARE
    else:
        room = _CPU_PIECE_BYTES
    # Torch's own operators need the logits in fp32; the fused kernel keeps them as they are.
    item_bytes = logits.element_size() if _fused(logits) else 4
    return max(1, min(tokens, -(-tokens * rows * item_bytes // room)))


def _fused(tensor: Tensor) -> bool:
    """Whether the one-kernel cross-entropy can run on this tensor."""
    return tensor.is_cuda and has_triton()


def _log_probabilities(hidden_nd: Tensor, weight_vd: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Logits of one piece, and their log-softmax in fp32; padding rows have probability 0."""
    logits_nv = torch.mm(hidden_nd, weight_vd.t())
    logits_nv[:, vocab:] = float("-inf")
    return logits_nv, logits_nv.log_softmax(dim=-1, dtype=torch.float32)


def _losses_only(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int) -> Tensor:
    """Token losses of one piece, 0 where there is no target."""
    if _fused(hidden_nd):
        from keepstep.models.kernels.cross_entropy import cross_entropy_

        return cross_entropy_(torch.mm(hidden_nd, weight_vd.t()), targets_n, vocab, with_gradient=False)
    loss_n = _token_losses(_log_probabilities(hidden_nd, weight_vd, vocab)[1], targets_n)
    return loss_n.where(targets_n != NO_LOSS, 0.0)


def _token_losses(log_probability_nv: Tensor, targets_n: Tensor) -> Tensor:
    """Minus the log-probability of each target; of token 0 where there is none, for the caller to leave out."""
    return -log_probability_nv.gather(1, targets_n.clamp(min=0)[:, None]).squeeze(1)


class _WeightSum:
    """What the head's gradient is added up in, piece by piece."""

    def __init__(self, weight_vd: Tensor, pieces: int) -> None:
        self._only = pieces == 1
        # fp32: a sum over many pieces in bfloat16 would stop growing. One piece is summed inside its product.
        self.total_vd = torch.empty_like(weight_vd) if self._only else torch.zeros_like(weight_vd, dtype=torch.float32)

    def add(self, left_vn: Tensor, right_nd: Tensor) -> None:
        """Add a product of matrices."""
        total_vd = self.total_vd
        if self._only:
            multiply_into(total_vd, left_vn, right_nd)
        elif total_vd.dtype == left_vn.dtype:
            total_vd.addmm_(left_vn, right_nd)
        elif total_vd.is_cuda:
            # The GPU's kernels add half-precision products to an fp32 matrix without rounding in between.
            torch.addmm(total_vd, left_vn, right_nd, out_dtype=torch.float32, out=total_vd)
        else:
            total_vd.add_(torch.mm(left_vn, right_nd))


class _ChunkedLoss(torch.autograd.Function):
    """Loss and, in the same pass, its gradient by hidden states and head weights."""

    @staticmethod
    def forward(ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int, pieces: int) -> Tensor:
        by_hidden, by_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        hidden_grad_nd = torch.empty_like(hidden_nd) if by_hidden else None
        weight_sum = _WeightSum(weight_vd, pieces) if by_weight else None
        piece_size = -(-hidden_nd.shape[0] // pieces)
        for start in range(0, hidden_nd.shape[0], piece_size):
            piece = slice(start, start + piece_size)
            grad_nd = None if hidden_grad_nd is None else hidden_grad_nd[piece]
            loss += _piece_loss(hidden_nd[piece], weight_vd, targets_n[piece], vocab, grad_nd, weight_sum)
        ctx.grads = (hidden_grad_nd, weight_sum and weight_sum.total_vd, weight_vd.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden_grad_nd, weight_grad_vd, weight_dtype = ctx.grads
        del ctx.grads
        for grad in (hidden_grad_nd, weight_grad_vd):
            if grad is not None:
                _scale_in_place(grad, grad_outputs[0])
        by_weight = None if weight_grad_vd is None else weight_grad_vd.to(weight_dtype)
        return hidden_grad_nd, by_weight, None, None, None


def _piece_loss(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    targets_n: Tensor,
    vocab: int,
    hidden_grad_nd: Tensor | None,
    weight_sum: _WeightSum | None,
) -> Tensor:
    """One piece's loss; fills its hidden states' gradient and adds to the weights'. Its logits are gone on return."""
    if _fused(hidden_nd):
        from keepstep.models.kernels.cross_entropy import cross_entropy_

        logits_nv = hidden_nd.new_empty((len(hidden_nd), len(weight_vd)))
        multiply_into(logits_nv, hidden_nd, weight_vd.t())
        loss_n = cross_entropy_(logits_nv, targets_n, vocab, with_gradient=True)
        if hidden_grad_nd is not None:
            multiply_into(hidden_grad_nd, logits_nv, weight_vd)
        if weight_sum is not None:
            weight_sum.add(logits_nv.t(), hidden_nd)
        return loss_n.sum()
    counts_n1 = (targets_n != NO_LOSS)[:, None]
    logits_nv, log_probability_nv = _log_probabilities(hidden_nd, weight_vd, vocab)
    loss_n = _token_losses(log_probability_nv, targets_n)
    logits_grad_nv = _logits_grad(logits_nv, log_probability_nv, loss_n, targets_n)
    # Tokens without a target are left out on the narrow side of both products: v is many times d.
    if hidden_grad_nd is not None:
        torch.mul(torch.mm(logits_grad_nv, weight_vd), counts_n1, out=hidden_grad_nd)
    if weight_sum is not None:
        weight_sum.add(logits_grad_nv.t(), hidden_nd * counts_n1)
    return loss_n.where(counts_n1.squeeze(1), 0.0).sum()


def _logits_grad(logits_nv: Tensor, log_probability_nv: Tensor, loss_n: Tensor, targets_n: Tensor) -> Tensor:
    """Probability, minus one at the target. Reuses the memory of the logits."""
    grad_nv = torch.exp(log_probability_nv, out=logits_nv)
    rows_n = torch.arange(targets_n.shape[0], device=targets_n.device)
    # expm1: for a token the model is sure of, rounding the probability first would leave nothing of the difference.
    grad_nv[rows_n, targets_n.clamp(min=0)] = torch.expm1(-loss_n).to(grad_nv.dtype)
    return grad_nv


def _scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    if _fused(tensor):
        from keepstep.models.kernels.cross_entropy import scale_

        scale_(tensor, factor)
    else:
        tensor.mul_(factor)
