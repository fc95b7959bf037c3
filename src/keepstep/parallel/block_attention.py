"""Attention of some queries to one block of keys, with what merging blocks needs: the log-sum-exp of the scores.

Shape legend: b rows, t query tokens, s key tokens, n query heads, g key-value heads, e head size.

Without a bias torch's fused kernels do the work if they can, otherwise plain matmuls, some queries at a time, so that
memory does not grow with t × s. Keys that none of these queries can attend to are left out: those that come later, and
those outside of a sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_QUERIES_AT_ONCE = 512
_FEWEST_QUERIES = 128


@dataclass(frozen=True)
class BlockMask:
    """Who may attend to whom between these queries and keys, where being causal does not say it all.

    Queries and keys are each one piece of the row without gaps.
    """

    distance: int
    """Tokens from the first key to the first query; negative where the keys come later."""
    slopes_n: Tensor | None
    """ALiBi slopes of the query heads."""
    query_documents_bt: Tensor | None
    key_documents_bs: Tensor | None
    window: int

    def reached_keys(self, queries: slice, keys: int) -> slice:
        """Which of `keys` keys some of these queries may attend to."""
        start = max(0, self.distance + queries.start - self.window + 1) if self.window else 0
        return slice(start, max(start, min(keys, self.distance + queries.stop)))

    def bias(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """What is added to the scores of these queries and keys, fp32 [b or 1, n or 1, t, s]; -inf where forbidden."""
        query_t = torch.arange(queries.start, queries.stop, device=device) + self.distance
        distance_ts = query_t[:, None] - torch.arange(keys.start, keys.stop, device=device)
        allowed = (distance_ts >= 0)[None, None]
        if self.window:
            allowed = allowed & (distance_ts < self.window)
        if self.query_documents_bt is not None and self.key_documents_bs is not None:
            same = self.query_documents_bt[:, queries, None] == self.key_documents_bs[:, None, keys]
            allowed = allowed & same[:, None]
        penalty = torch.zeros_like(distance_ts, dtype=torch.float32)[None]
        if self.slopes_n is not None:
            penalty = -self.slopes_n[:, None, None] * distance_ts
        return penalty[None].masked_fill(~allowed, float("-inf"))


@dataclass(frozen=True)
class Block:
    """Queries [b, n, t, e] against keys and values [b, n, s, e]."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    """Token i of the block attends to tokens up to i; the block is square then."""
    mask: BlockMask | None
    given_scale: float | None = None
    softcap: float = 0.0
    """Scores stay within ± this, by tanh; 0 for no bound."""

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.given_scale or 1.0 / math.sqrt(self.query.shape[-1])


def attend_block(block: Block) -> tuple[Tensor, Tensor]:
    """Mixed values and the log-sum-exp of the scores, both fp32: [b, n, t, e] and [b, n, t]."""
    kernel = _kernel(block)
    if kernel == "plain":
        parts = [_attend_some(block, *slices) for slices in _slices(block)]
        return torch.cat([mixed for mixed, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)
    on_cpu, on_gpu = _ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention
    run = on_cpu if kernel == "cpu" else on_gpu
    mixed, lse = run(block.query, block.key, block.value, 0.0, block.causal, scale=block.scale)[:2]
    return mixed.float(), lse.float()


def block_gradients(block: Block, mixed: Tensor, lse: Tensor, mixed_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of query, key and value, in fp32.

    `mixed` and `lse` are those over ALL blocks: with them a block's probabilities are what they were in the whole row,
    so that parts of all blocks simply add up.
    """
    kernel = _kernel(block)
    if kernel == "plain":
        return _plain_gradients(block, mixed, lse, mixed_grad)
    mixed_grad, mixed = (each.to(block.query.dtype).contiguous() for each in (mixed_grad, mixed))
    operands: tuple[Any, ...] = (mixed_grad, block.query, block.key, block.value, mixed, lse.contiguous())
    if kernel == "cpu":
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, 0.0, block.causal, scale=block.scale
        )
    else:
        # Without dropout the kernel draws no random number; it wants a place for the generator's state all the same.
        unused = torch.empty(0, dtype=torch.int64, device=mixed.device)
        sizes = (block.query.shape[2], block.key.shape[2])
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            *operands, None, None, *sizes, 0.0, block.causal, unused, unused, scale=block.scale
        )
    by_query, by_key, by_value = (grad.float() for grad in grads)
    return by_query, by_key, by_value


def _kernel(block: Block) -> str:
    query = block.query
    if block.mask is not None or block.softcap:
        return "plain"
    if query.device.type == "cpu":
        return "cpu"
    fits = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return "flash" if query.is_cuda and fits else "plain"


def _slices(block: Block) -> Iterator[tuple[slice, slice]]:
    """Some queries at a time, and the keys that they can attend to."""
    count, keys = block.query.shape[2], block.key.shape[2]
    window = block.mask.window if block.mask is not None else 0
    # Many queries next to a short window would compute mostly what it hides.
    together = min(_QUERIES_AT_ONCE, max(_FEWEST_QUERIES, window)) if window else _QUERIES_AT_ONCE
    for start in range(0, count, together):
        queries = slice(start, min(start + together, count))
        yield queries, slice(0, keys) if block.mask is None else block.mask.reached_keys(queries, keys)


def _scores(block: Block, queries: slice, keys: slice) -> Tensor:
    scores_bnts = (block.query[:, :, queries] @ block.key[:, :, keys].transpose(2, 3)).float() * block.scale
    return block.softcap * torch.tanh(scores_bnts / block.softcap) if block.softcap else scores_bnts


def _masked(block: Block, queries: slice, keys: slice, scores_bnts: Tensor) -> Tensor:
    if block.mask is not None:
        return scores_bnts + block.mask.bias(queries, keys, scores_bnts.device)
    if block.causal:
        key_s = torch.arange(block.key.shape[2], device=scores_bnts.device)
        scores_bnts = scores_bnts.masked_fill(key_s > key_s[queries, None], float("-inf"))
    return scores_bnts


def _attend_some(block: Block, queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
    scores_bnts = _masked(block, queries, keys, _scores(block, queries, keys))
    lse_bnt = scores_bnts.logsumexp(dim=-1)
    # A query that may attend to nothing here has -inf for its sum: its probabilities must be 0, not undefined.
    probability_bnts = torch.exp(scores_bnts - _finite(lse_bnt)[..., None])
    return (probability_bnts.to(block.value.dtype) @ block.value[:, :, keys]).float(), lse_bnt


def _plain_gradients(block: Block, mixed: Tensor, lse: Tensor, mixed_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = block.query.dtype
    by_query = torch.zeros_like(block.query, dtype=torch.float32)
    by_key = torch.zeros_like(block.key, dtype=torch.float32)
    by_value = torch.zeros_like(block.value, dtype=torch.float32)
    for queries, keys in _slices(block):
        grad_bnte = mixed_grad[:, :, queries]
        scores = _scores(block, queries, keys)
        probability = torch.exp(_masked(block, queries, keys, scores) - _finite(lse[:, :, queries])[..., None])
        # The softmax takes out what a shift of all scores would change: the row's mean gradient.
        mean_bnt1 = (grad_bnte.float() * mixed[:, :, queries].float()).sum(dim=-1, keepdim=True)
        by_probability = (grad_bnte.to(dtype) @ block.value[:, :, keys].transpose(2, 3)).float()
        by_score = probability * (by_probability - mean_bnt1) * block.scale
        if block.softcap:
            by_score = by_score * (1.0 - (scores / block.softcap).square())
        by_score = by_score.to(dtype)
        by_value[:, :, keys] += (probability.to(dtype).transpose(2, 3) @ grad_bnte.to(dtype)).float()
        by_key[:, :, keys] += (by_score.transpose(2, 3) @ block.query[:, :, queries]).float()
        by_query[:, :, queries] = (by_score @ block.key[:, :, keys]).float()
    return by_query, by_key, by_value


def _finite(lse: Tensor) -> Tensor:
    return lse.clamp(min=torch.finfo(torch.float32).min)
