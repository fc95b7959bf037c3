"""The output head and its cross-entropy, computed chunk by chunk so that all logits never exist together.

Shape legend: b rows, t tokens, n tokens of one chunk, d hidden, v rows of the head (vocabulary with padding).

With a vocabulary of 128k one row of 8192 tokens has 4 GiB of fp32 logits. Here each chunk's gradient is computed
right after its loss, from the same logits: nothing is computed twice and one chunk is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.core.tokens import IGNORE_INDEX
from keepstep.models.head_fp8 import (
    MULTIPLE,
    Side,
    cross_entropy_fp8,
    multiply_into,
    quantize_transposed,
    suits_fp8,
    transposed,
)
from keepstep.models.ops.backend import backend
from keepstep.models.ops.matmul import matmul_into


class Head(nn.Module):
    """An output head with weights of its own [v, d]. Calling it is what lets FSDP gather them."""

    def __init__(self, hidden: int, rows: int, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)
        self.output: Callable[..., Tensor] = head_output
        """Tensor parallelism puts a form of its own here, for a slice of the rows."""
        self.each_loss: Callable[..., Tensor] = token_losses

    def forward(
        self, hidden_btd: Tensor, targets_bt: Tensor | None = None, chunks: int = 0, *, each: bool = False
    ) -> Tensor:
        """Logits without targets; with them the sum of token losses, or `each` of them."""
        compute = self.each_loss if each else self.output
        return compute(hidden_btd, self.weight, targets_bt, self.vocab, chunks)


def head_output(
    hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor | None, vocab: int, chunks: int, *, fp8: bool = False
) -> Tensor:
    """Logits [b, t, v] without targets, the sum of token losses (fp32 scalar) with them; gradients by `fp8` matmuls."""
    if targets_bt is None:
        return head_logits(hidden_btd, weight_vd, vocab)
    return head_loss(hidden_btd, weight_vd, targets_bt, vocab, chunks, fp8=fp8)


def capped_output(
    hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor | None, vocab: int, chunks: int, *, cap: float
) -> Tensor:
    """The same with logits within ± `cap` by tanh."""
    if targets_bt is None:
        logits_btv = cap * torch.tanh(F.linear(hidden_btd, weight_vd) / cap)
        return _without_padding(logits_btv, vocab)
    hidden_nd, targets_n = _counted(hidden_btd.flatten(0, 1), targets_bt.flatten())
    return _each_loss(hidden_nd, weight_vd, targets_n, vocab, chunks, cap).sum()


def token_losses(
    hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor, vocab: int, chunks: int = 0, *, cap: float = 0.0
) -> Tensor:
    """The cross-entropy of each token [b, t] in fp32, 0 where there is no target.

    For losses that weigh tokens by what all of them gave: backward computes each chunk's logits again, because the
    weights are not known before.
    """
    hidden_nd, targets_n = hidden_btd.flatten(0, 1), targets_bt.flatten()
    counts_bt = targets_bt != IGNORE_INDEX
    if hidden_nd.device.type != "cpu" or not counts_bt.any():
        # FSDP's hooks do not like views.
        return _each_loss(hidden_nd, weight_vd, targets_n, vocab, chunks, cap).view(targets_bt.shape).clone()
    places_m = counts_bt.flatten().nonzero().squeeze(1)
    losses_m = _each_loss(hidden_nd[places_m], weight_vd, targets_n[places_m], vocab, chunks, cap)
    return torch.zeros(targets_bt.shape).masked_scatter(counts_bt, losses_m)


def _each_loss(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int, chunks: int, cap: float) -> Tensor:
    chunk_count = chunks or default_chunks(hidden_nd.shape[0], weight_vd.shape[0], hidden_nd)
    losses_n: Tensor = _EachLoss.apply(hidden_nd, weight_vd, targets_n, vocab, chunk_count, cap)  # type: ignore[no-untyped-call]
    return losses_n


def head_logits(hidden_btd: Tensor, weight_vd: Tensor, vocab: int) -> Tensor:
    """Logits of every token; those of padding rows are the lowest number there is, so that they never win."""
    return _without_padding(F.linear(hidden_btd, weight_vd), vocab)


def _without_padding(logits_btv: Tensor, vocab: int) -> Tensor:
    rows = logits_btv.shape[-1]
    if rows == vocab:
        return logits_btv
    return logits_btv.masked_fill(
        torch.arange(rows, device=logits_btv.device) >= vocab, torch.finfo(logits_btv.dtype).min
    )


def head_loss(
    hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor, vocab: int, chunks: int = 0, *, fp8: bool = False
) -> Tensor:
    """Sum of the cross-entropy of all tokens whose target is not -100, in fp32.

    `chunks` over tokens, 0 to choose by size. Matmuls run in the precision of the inputs, with `fp8` those of gradients
    in fp8 where sizes allow; softmax and sums in fp32. The gradient is computed with the loss, and only where gradients
    are on.
    """
    hidden_nd, targets_n = _counted(hidden_btd.flatten(0, 1), targets_bt.flatten())
    chunk_count = chunks or default_chunks(hidden_nd.shape[0], weight_vd.shape[0], hidden_nd)
    if torch.is_grad_enabled() and (hidden_nd.requires_grad or weight_vd.requires_grad):
        fp8 = fp8 and suits_fp8(hidden_nd, weight_vd)
        differentiable: Tensor = _ChunkedLoss.apply(hidden_nd, weight_vd, targets_n, vocab, chunk_count, fp8)  # type: ignore[no-untyped-call]
        return differentiable
    loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
    for chunk_nd, chunk_n in zip(hidden_nd.chunk(chunk_count), targets_n.chunk(chunk_count), strict=True):
        loss += _losses_only(chunk_nd, weight_vd, chunk_n, vocab).sum()
    return loss


def _counted(hidden_nd: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """On a CPU the tokens that have a target only: where the assistant alone is learnt, that is a fifth of them.

    A GPU takes them all, because counting them would make it wait.
    """
    if hidden_nd.device.type != "cpu" or backend().has_cross_entropy(hidden_nd):
        return hidden_nd, targets_n
    places_m = (targets_n != IGNORE_INDEX).nonzero().squeeze(1)
    if 2 * places_m.numel() > targets_n.numel() or not places_m.numel():
        return hidden_nd, targets_n
    return hidden_nd.index_select(0, places_m), targets_n.index_select(0, places_m)


def default_chunks(tokens: int, rows: int, logits: Tensor) -> int:
    """Chunks that keep one chunk's logits within what suits the device; `logits` gives device and precision."""
    # Torch's own operators need the logits in fp32; the fused kernel keeps them as they are.
    item_bytes = logits.element_size() if backend().has_cross_entropy(logits) else 4
    return max(1, min(tokens, -(-tokens * rows * item_bytes // backend().chunk_bytes(logits))))


def _cap_(logits: Tensor, cap: float) -> Tensor:
    """Logits within ± `cap` by tanh, in place; 0 leaves them as they are."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _log_probabilities(hidden_nd: Tensor, weight_vd: Tensor, vocab: int, cap: float) -> tuple[Tensor, Tensor]:
    """Logits of one chunk, and their log-softmax in fp32; padding rows have probability 0."""
    logits_nv = _cap_(torch.mm(hidden_nd, weight_vd.t()), cap)
    logits_nv[:, vocab:] = float("-inf")
    return logits_nv, logits_nv.log_softmax(dim=-1, dtype=torch.float32)


def _losses_only(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int, cap: float = 0.0) -> Tensor:
    """Token losses of one chunk, 0 where there is no target."""
    if backend().has_cross_entropy(hidden_nd):
        return backend().cross_entropy_(_cap_(torch.mm(hidden_nd, weight_vd.t()), cap), targets_n, vocab, False)
    loss_n = _token_losses(_log_probabilities(hidden_nd, weight_vd, vocab, cap)[1], targets_n)
    return loss_n.where(targets_n != IGNORE_INDEX, 0.0)


def _token_losses(log_probability_nv: Tensor, targets_n: Tensor) -> Tensor:
    """Minus the log-probability of each target; of token 0 where there is none, for the caller to leave out."""
    return -log_probability_nv.gather(1, targets_n.clamp(min=0)[:, None]).squeeze(1)


class _WeightSum:
    """What the head's gradient is added up in, chunk by chunk."""

    def __init__(self, weight_vd: Tensor, chunk_count: int) -> None:
        self._only = chunk_count == 1
        # fp32: a sum over many chunks in bfloat16 would stop growing. One chunk is summed inside its matmul.
        self.total_vd = torch.empty_like(weight_vd) if self._only else torch.zeros_like(weight_vd, dtype=torch.float32)

    def add(self, left_vn: Tensor, right_nd: Tensor) -> None:
        """Add left · right."""
        total_vd = self.total_vd
        if self._only:
            matmul_into(total_vd, left_vn, right_nd)
        else:
            backend().add_matmul_(total_vd, left_vn, right_nd)

    def add_fp8(self, left_vn: Side, right_dn: Side, dtype: torch.dtype) -> None:
        """Add left · rightᵀ, a product in fp8 that is rounded to `dtype`."""
        if self._only:
            multiply_into(self.total_vd, left_vn, right_dn)
        else:
            part_vd = torch.empty_like(self.total_vd, dtype=dtype)
            multiply_into(part_vd, left_vn, right_dn)
            self.total_vd.add_(part_vd)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and, in the same pass, its gradient by hidden states and head weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int, chunk_count: int, fp8: bool
    ) -> Tensor:
        by_hidden, by_weight = ctx.needs_input_grad[:2]
        weight_dv = quantize_transposed(weight_vd) if fp8 and by_hidden else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        hidden_grad_nd = torch.empty_like(hidden_nd) if by_hidden else None
        weight_sum = _WeightSum(weight_vd, chunk_count) if by_weight else None
        chunk_size = -(-hidden_nd.shape[0] // chunk_count)
        if fp8:
            chunk_size = -(-chunk_size // MULTIPLE) * MULTIPLE
        for start in range(0, hidden_nd.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            grad_nd = None if hidden_grad_nd is None else hidden_grad_nd[chunk]
            one = hidden_nd[chunk], weight_vd, targets_n[chunk], vocab, grad_nd, weight_sum
            loss += _chunk_loss_fp8(*one, weight_dv) if fp8 else _chunk_loss(*one)
        ctx.grads = (hidden_grad_nd, weight_sum and weight_sum.total_vd, weight_vd.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden_grad_nd, weight_grad_vd, weight_dtype = ctx.grads
        del ctx.grads
        for grad in (hidden_grad_nd, weight_grad_vd):
            if grad is not None:
                backend().scale_(grad, grad_outputs[0])
        by_weight = None if weight_grad_vd is None else weight_grad_vd.to(weight_dtype)
        return hidden_grad_nd, by_weight, None, None, None, None


class _EachLoss(torch.autograd.Function):
    """The loss of each token. Backward computes the logits again, because only then is each one's weight known."""

    @staticmethod
    def forward(
        ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, vocab: int, chunk_count: int, cap: float
    ) -> Tensor:
        ctx.save_for_backward(hidden_nd, weight_vd, targets_n)
        ctx.vocab, ctx.chunk_count, ctx.cap = vocab, chunk_count, cap
        chunks = zip(hidden_nd.chunk(chunk_count), targets_n.chunk(chunk_count), strict=True)
        return torch.cat([_losses_only(chunk_nd, weight_vd, chunk_n, vocab, cap) for chunk_nd, chunk_n in chunks])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden_nd, weight_vd, targets_n = ctx.saved_tensors
        by_hidden, by_weight = ctx.needs_input_grad[:2]
        hidden_grad_nd = torch.empty_like(hidden_nd) if by_hidden else None
        weight_sum = _WeightSum(weight_vd, ctx.chunk_count) if by_weight else None
        chunk_size = -(-hidden_nd.shape[0] // ctx.chunk_count)
        for start in range(0, hidden_nd.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            grad_nd = None if hidden_grad_nd is None else hidden_grad_nd[chunk]
            scale = _Scale(grad_outputs[0][chunk, None].to(hidden_nd.dtype), ctx.cap)
            _chunk_loss(hidden_nd[chunk], weight_vd, targets_n[chunk], ctx.vocab, grad_nd, weight_sum, scale)
        return hidden_grad_nd, weight_sum and weight_sum.total_vd.to(weight_vd.dtype), None, None, None, None


class _Scale(NamedTuple):
    """What gradients of logits are multiplied by."""

    tokens_n1: Tensor | None = None
    """Weights of tokens. They go to the narrow side of both matmuls: v is many times d."""
    cap: float = 0.0

    def slope(self, capped_nv: Tensor) -> Tensor | None:
        """The derivative of soft-capped logits by those before; logits may be overwritten afterwards."""
        return 1 - (capped_nv / self.cap).square_() if self.cap else None


def _chunk_loss(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    targets_n: Tensor,
    vocab: int,
    hidden_grad_nd: Tensor | None,
    weight_sum: _WeightSum | None,
    scale: _Scale = _Scale(),  # noqa: B008 - a tuple
) -> Tensor:
    """One chunk's loss; fills the gradient of its hidden states and adds to that of the weights."""
    weights_n1 = scale.tokens_n1
    if backend().has_cross_entropy(hidden_nd):
        grad_nv = hidden_nd.new_empty((len(hidden_nd), len(weight_vd)))
        matmul_into(grad_nv, hidden_nd, weight_vd.t())
        slope_nv = scale.slope(_cap_(grad_nv, scale.cap))
        loss_n = backend().cross_entropy_(grad_nv, targets_n, vocab, True)
    else:
        counts_n = targets_n != IGNORE_INDEX
        # Tokens without a target are left out the same way.
        weights_n1 = counts_n[:, None] if weights_n1 is None else counts_n[:, None] * weights_n1
        logits_nv, log_probability_nv = _log_probabilities(hidden_nd, weight_vd, vocab, scale.cap)
        loss_n = _token_losses(log_probability_nv, targets_n)
        slope_nv = scale.slope(logits_nv)
        grad_nv = _logits_grad(logits_nv, log_probability_nv, loss_n, targets_n)
        loss_n = loss_n.where(counts_n, 0.0)
    if slope_nv is not None:
        grad_nv.mul_(slope_nv)
        grad_nv[:, vocab:] = 0
    if hidden_grad_nd is not None:
        matmul_into(hidden_grad_nd, grad_nv, weight_vd)
        if weights_n1 is not None:
            hidden_grad_nd.mul_(weights_n1)
    if weight_sum is not None:
        weight_sum.add(grad_nv.t(), hidden_nd if weights_n1 is None else hidden_nd * weights_n1)
    return loss_n.sum()


def _chunk_loss_fp8(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    targets_n: Tensor,
    vocab: int,
    hidden_grad_nd: Tensor | None,
    weight_sum: _WeightSum | None,
    weight_dv: Side | None,
) -> Tensor:
    """The same with gradients by matmuls in fp8; the weight's second form is that of the matmul for hidden states."""
    logits_nv = hidden_nd.new_empty((len(hidden_nd), len(weight_vd)))
    matmul_into(logits_nv, hidden_nd, weight_vd.t())
    loss_n, grad_nv = cross_entropy_fp8(logits_nv, targets_n, vocab)
    # The transposed copy of the gradient takes their memory.
    del logits_nv
    if hidden_grad_nd is not None and weight_dv is not None:
        multiply_into(hidden_grad_nd, grad_nv, weight_dv)
    if weight_sum is not None:
        weight_sum.add_fp8(transposed(grad_nv), quantize_transposed(hidden_nd), weight_vd.dtype)
    return loss_n.sum()


def _logits_grad(logits_nv: Tensor, log_probability_nv: Tensor, loss_n: Tensor, targets_n: Tensor) -> Tensor:
    """Probability, minus one at the target. Reuses the memory of the logits."""
    grad_nv = torch.exp(log_probability_nv, out=logits_nv)
    rows_n = torch.arange(targets_n.shape[0], device=targets_n.device)
    # expm1: for a token the model is sure of, rounding the probability first would leave nothing of the difference.
    grad_nv[rows_n, targets_n.clamp(min=0)] = torch.expm1(-loss_n).to(grad_nv.dtype)
    return grad_nv
