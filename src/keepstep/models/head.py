"""The output head and its cross-entropy, computed piece by piece so that all logits never exist at once.

Shape legend: b rows, t tokens, n tokens of one piece, d hidden, v rows of the head (vocabulary with padding).

With a vocabulary of 128k one row of 8192 tokens has 4 GiB of fp32 logits. Here each piece's gradient is computed right
after its loss, while its logits are at hand: nothing is computed twice and only one piece is in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NO_LOSS = -100
"""Target of a token that adds nothing to the loss."""
_PIECE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""fp32 logits of one piece. On a GPU smaller pieces pay for adding up the head's gradient; on a CPU they stay near
the caches."""


class Head(nn.Module):
    """An output head with weights of its own [v, d]. Calling it is what lets FSDP gather them."""

    def __init__(self, hidden: int, rows: int, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, hidden_btd: Tensor, targets_bt: Tensor | None = None, chunks: int = 0) -> Tensor:
        """Logits without targets, the sum of token losses with them."""
        return head_output(hidden_btd, self.weight, targets_bt, self.vocab, chunks)


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
    hidden_nd, targets_n = hidden_btd.flatten(0, 1), targets_bt.flatten()
    pieces = chunks or default_chunks(hidden_nd.shape[0], weight_vd.shape[0], hidden_nd.device.type)
    if torch.is_grad_enabled() and (hidden_nd.requires_grad or weight_vd.requires_grad):
        differentiable: Tensor = _ChunkedLoss.apply(hidden_nd, weight_vd, targets_n, vocab, pieces)  # type: ignore[no-untyped-call]
        return differentiable
    loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
    for piece_nd, piece_n in zip(hidden_nd.chunk(pieces), targets_n.chunk(pieces), strict=True):
        loss += _piece_loss(piece_nd, weight_vd, piece_n, vocab)[0].sum()
    return loss


def default_chunks(tokens: int, rows: int, device: str) -> int:
    """Pieces that keep one piece's fp32 logits within what suits the device."""
    return max(1, min(tokens, -(-tokens * rows * 4 // _PIECE_BYTES.get(device, _PIECE_BYTES["cuda"]))))


def _piece_loss(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Token losses of one piece (0 where there is no target) and the log-probabilities [n, v] they come from."""
    logits_nv = torch.mm(hidden_nd, weight_vd.t())
    logits_nv[:, vocab:] = float("-inf")
    log_probability_nv = logits_nv.log_softmax(dim=-1, dtype=torch.float32)
    picked_n = log_probability_nv.gather(1, targets_n.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets_n == NO_LOSS, 0.0, -picked_n), log_probability_nv


class _ChunkedLoss(torch.autograd.Function):
    """Loss and, in the same pass, its gradient by hidden states and head weights."""

    @staticmethod
    def forward(ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int, pieces: int) -> Tensor:
        by_hidden, by_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        hidden_grad_nd = torch.empty_like(hidden_nd) if by_hidden else None
        # fp32: a sum over many pieces in bfloat16 would stop growing.
        weight_grad_vd = torch.zeros_like(weight_vd, dtype=torch.float32) if by_weight else None
        for start, piece_nd, piece_n in _pieces(hidden_nd, targets_n, pieces):
            loss_n, log_probability_nv = _piece_loss(piece_nd, weight_vd, piece_n, vocab)
            loss += loss_n.sum()
            logits_grad_nv = _logits_grad(log_probability_nv, piece_n).to(hidden_nd.dtype)
            if hidden_grad_nd is not None:
                torch.mm(logits_grad_nv, weight_vd, out=hidden_grad_nd[start : start + piece_nd.shape[0]])
            if weight_grad_vd is not None:
                _add_product(weight_grad_vd, logits_grad_nv.t(), piece_nd)
        ctx.grads = (hidden_grad_nd, weight_grad_vd, weight_vd.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden_grad_nd, weight_grad_vd, weight_dtype = ctx.grads
        del ctx.grads
        scale = grad_outputs[0]
        by_hidden = None if hidden_grad_nd is None else (hidden_grad_nd * scale).to(hidden_grad_nd.dtype)
        by_weight = None if weight_grad_vd is None else weight_grad_vd.mul_(scale).to(weight_dtype)
        return by_hidden, by_weight, None, None, None


def _pieces(hidden_nd: Tensor, targets_n: Tensor, pieces: int) -> list[tuple[int, Tensor, Tensor]]:
    chunks_nd = hidden_nd.chunk(pieces)
    starts = [index * chunks_nd[0].shape[0] for index in range(len(chunks_nd))]
    return list(zip(starts, chunks_nd, targets_n.chunk(pieces), strict=True))


def _logits_grad(log_probability_nv: Tensor, targets_n: Tensor) -> Tensor:
    """Probability minus one at the target; zero rows where there is no target. Overwrites its input."""
    grad_nv = log_probability_nv.exp_()
    rows_n = torch.arange(targets_n.shape[0], device=targets_n.device)
    grad_nv[rows_n, targets_n.clamp(min=0)] -= 1.0
    return grad_nv.masked_fill_((targets_n == NO_LOSS)[:, None], 0.0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
