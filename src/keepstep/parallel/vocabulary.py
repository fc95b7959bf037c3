"""Head and cross-entropy over a vocabulary split between processes, chunk by chunk as in `models/head`.

Shape legend: b rows, t tokens, n tokens of one chunk, d hidden, v this process's rows of the head.

No process ever holds all logits of a token: maximum, sum of exponentials and the target's logit are small numbers that
are combined over processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.core.tokens import IGNORE_INDEX
from keepstep.models.head import default_chunks
from keepstep.models.transformer import Transformer
from keepstep.parallel.parts import ROWS, gather_parts, local_part


@dataclass(frozen=True)
class VocabularySlice:
    """The rows of embedding and head that this process holds."""

    first: int
    rows: int
    group: dist.ProcessGroup | None
    """Who holds the other rows; None where this process holds all."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All processes' parts."""
        return x if self.group is None else gather_parts(x, dim, self.group)

    def combine(self, x: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Sum or maximum over processes, in place."""
        if self.group is not None:
            dist.all_reduce(x, operation, group=self.group)


def repeat_output(model: Transformer, is_split: bool) -> None:
    """Let the head of a model be differentiated twice: zero-bubble schedules ask for inputs, then for weights.

    `is_split` says that tensor parallelism has put its own output in place already.
    """
    whole = VocabularySlice(0, model.config.padded_vocab, None)
    cap = model.config.final_logit_softcapping
    output = model.tied_output if is_split else partial(vocabulary_output, vocabulary=whole, cap=cap)
    model.tied_output = partial(output, backward_runs=2)
    if model.head is not None:
        model.head.output = model.tied_output


def vocabulary_output(
    hidden_btd: Tensor,
    weight_vd: Tensor,
    targets_bt: Tensor | None,
    vocab: int,
    chunks: int,
    *,
    vocabulary: VocabularySlice,
    cap: float = 0.0,
    backward_runs: int = 1,
) -> Tensor:
    """`models.head.head_output` for a slice of the rows; `hidden_btd` holds this process's part of the row.

    Every process returns the same: the sum of token losses, or without targets the logits of the whole vocabulary, both
    with logits within ± `cap` where there is one.
    After `backward_runs` backward passes the gradients kept since the forward pass are let go.
    """
    hidden_btd = vocabulary.gather(hidden_btd, 1)
    weight_vd = local_part(weight_vd, ROWS)
    if targets_bt is None:
        padding_v = _padding(vocabulary, vocab, hidden_btd.device)
        logits_btv = torch.nn.functional.linear(hidden_btd, weight_vd)
        if cap:
            logits_btv = cap * torch.tanh(logits_btv / cap)
        logits_btv = logits_btv.masked_fill(padding_v, torch.finfo(logits_btv.dtype).min)
        return vocabulary.gather(logits_btv, 2)
    hidden_nd, targets_n = hidden_btd.flatten(0, 1), targets_bt.flatten()
    chunk_count = chunks or default_chunks(hidden_nd.shape[0], vocabulary.rows, hidden_nd)
    loss: Tensor = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        hidden_nd, weight_vd, targets_n, vocab, chunk_count, vocabulary, cap, backward_runs
    )
    return loss


class _VocabularyLoss(torch.autograd.Function):
    """Loss and, in the same pass, its gradient by hidden states (this process's share) and our rows of the head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        targets_n: Tensor,
        vocab: int,
        chunk_count: int,
        vocabulary: VocabularySlice,
        cap: float,
        backward_runs: int,
    ) -> Tensor:
        padding_v = _padding(vocabulary, vocab, hidden_nd.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        hidden_grad_nd = torch.empty_like(hidden_nd) if ctx.needs_input_grad[0] else None
        # fp32: a sum over many chunks in bfloat16 would stop growing.
        weight_grad_vd = torch.zeros_like(weight_vd, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        chunk_size = -(-hidden_nd.shape[0] // chunk_count)
        for start in range(0, hidden_nd.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            logits_nv = torch.mm(hidden_nd[chunk], weight_vd.t()).float()
            tanh_nv = logits_nv.div_(cap).tanh_() if cap else None
            logits_nv = (logits_nv if tanh_nv is None else cap * tanh_nv).masked_fill_(padding_v, float("-inf"))
            loss_n, logits_grad_nv = _chunk_loss(logits_nv, targets_n[chunk], vocabulary)
            loss += loss_n.sum()
            if tanh_nv is not None:
                logits_grad_nv *= 1.0 - tanh_nv.square()
            logits_grad_nv = logits_grad_nv.to(hidden_nd.dtype)
            if hidden_grad_nd is not None:
                hidden_grad_nd[chunk] = torch.mm(logits_grad_nv, weight_vd)
            if weight_grad_vd is not None:
                weight_grad_vd += torch.mm(logits_grad_nv.t(), hidden_nd[chunk])
        ctx.grads = (hidden_grad_nd, weight_grad_vd, weight_vd.dtype)
        ctx.runs_left = backward_runs
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden_grad_nd, weight_grad_vd, weight_dtype = ctx.grads
        ctx.runs_left -= 1
        if ctx.runs_left == 0:
            # A pipeline keeps each micro batch's graph to the end of the step: what it holds would pile up.
            del ctx.grads
        scale = grad_outputs[0]
        by_hidden = None if hidden_grad_nd is None else (hidden_grad_nd * scale).to(hidden_grad_nd.dtype)
        by_weight = None if weight_grad_vd is None else (weight_grad_vd * scale).to(weight_dtype)
        return by_hidden, by_weight, None, None, None, None, None, None


def _chunk_loss(logits_nv: Tensor, targets_n: Tensor, vocabulary: VocabularySlice) -> tuple[Tensor, Tensor]:
    """Token losses (0 where there is no target) and their gradient by our logits, which are overwritten."""
    local_n = targets_n - vocabulary.first
    ours_n = (local_n >= 0) & (local_n < vocabulary.rows)
    local_n1 = local_n.masked_fill(~ours_n, 0)[:, None]
    highest_n = logits_nv.amax(dim=1)
    vocabulary.combine(highest_n, dist.ReduceOp.MAX)
    logits_nv -= highest_n[:, None]
    target_logit_n = logits_nv.gather(1, local_n1).squeeze(1).masked_fill(~ours_n, 0.0)
    exponential_nv = logits_nv.exp_()
    sums_2n = torch.stack([exponential_nv.sum(dim=1), target_logit_n])
    vocabulary.combine(sums_2n)
    total_n, target_logit_n = sums_2n.unbind()
    counts_n = targets_n != IGNORE_INDEX
    loss_n = (total_n.log() - target_logit_n).where(counts_n, 0.0)
    grad_nv = exponential_nv.div_(total_n[:, None])
    grad_nv.scatter_add_(1, local_n1, -ours_n[:, None].to(grad_nv.dtype))
    return loss_n, grad_nv.masked_fill_(~counts_n[:, None], 0.0)


def _padding(vocabulary: VocabularySlice, vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocabulary.first, vocabulary.first + vocabulary.rows, device=device) >= vocab
