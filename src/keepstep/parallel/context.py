"""Context parallelism: each process holds a part of every row, and attention passes keys and values around a ring.

Shape legend: b rows, t tokens on this process, n query heads, g key-value heads, e head size, r processes.

Rows are cut zigzag: of 2c pieces process r holds piece r and piece 2c-1-r. The early piece attends to little, the late
one to much, so that under a causal mask all processes have equal work in every round of the ring:
- keys of an earlier process: all our queries attend to its early piece, none to its late one;
- keys of a later process: our late queries attend to both its pieces, our early ones to none;
- our own keys: plain causal attention, since our two pieces are in order.

With packed documents, ALiBi or a sliding window, pieces are computed pair by pair. A window leaves most pairs out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.data.batch import Batch, document_positions
from keepstep.models.attention_context import Context, KeyValueCache, each_kind
from keepstep.models.ops.varlen_attention import VarlenSpans
from keepstep.models.positions import alibi_slopes, rope_tables
from keepstep.models.transformer import Transformer
from keepstep.parallel.block_attention import Block, BlockMask, attend_block, block_gradients


class RingContext(Context):
    """What blocks share in a forward, plus what the ring needs."""

    __slots__ = ("documents_rbt",)

    def __init__(self, config: ModelConfig, positions_bt: Tensor, documents_rbt: Tensor | None) -> None:
        rotary = rope_tables(config, positions_bt) if config.positions == "rotary" else None
        scores = (config.sliding_window, config.score_scale, config.attn_logit_softcapping)
        super().__init__(None, True, rotary, None, None, *scores)
        self.documents_rbt = documents_rbt


def split_rows(model: Transformer, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Let a model (or a stage of one) work on parts of rows, in place; returns what its blocks attend with.

    Positions must be given with every batch.
    """
    model.make_context = partial(_ring_context, group=group)
    return partial(_attend, config=model.config, group=group)


def own_part(batch: Batch, rank: int, size: int) -> Batch:
    """This process's part of a micro batch, with positions that say where in the rows (or documents) it stands."""
    if size == 1:
        return batch
    positions = row_positions(batch)

    def part(array: NDArray[np.int64]) -> NDArray[np.int64]:
        pieces = np.split(array, 2 * size, axis=1)
        return np.concatenate([pieces[rank], pieces[2 * size - 1 - rank]], axis=1)

    return Batch(
        inputs=part(batch.inputs),
        targets=part(batch.targets),
        positions=part(positions),
        documents=None if batch.documents is None else part(batch.documents),
        first_sample=batch.first_sample,
    )


def row_positions(batch: Batch) -> NDArray[np.int64]:
    """The batch's positions; where it has none those in the row, or in the document where documents are packed."""
    if batch.positions is not None:
        return batch.positions
    if batch.documents is not None:
        return document_positions(batch.documents)
    return np.broadcast_to(np.arange(batch.inputs.shape[1], dtype=np.int64), batch.inputs.shape)


def _ring_context(
    config: ModelConfig,
    _x_btd: Tensor,
    positions_bt: Tensor,
    documents_bt: Tensor | None,
    cache: KeyValueCache | None,
    spans: VarlenSpans | None = None,
    *,
    group: dist.ProcessGroup,
) -> Context:
    assert cache is None, "decoding does not split rows"
    assert spans is None, "the ring asks each process for its documents"
    documents_rbt = None
    if documents_bt is not None:
        everyone = [torch.empty_like(documents_bt) for _ in range(group.size())]
        dist.all_gather(everyone, documents_bt.contiguous(), group=group)
        documents_rbt = torch.stack(everyone)
    return each_kind(config, lambda kind: RingContext(kind, positions_bt, documents_rbt))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    query_btne: Tensor,
    key_btge: Tensor,
    value_btge: Tensor,
    first_head: int,
    context: Context,
    sinks_n: Tensor | None = None,
    *,
    config: ModelConfig,
    group: dist.ProcessGroup,
) -> Tensor:
    assert isinstance(context, RingContext)
    heads = query_btne.shape[2]
    slopes_n = None
    if config.positions == "alibi":
        all_slopes = alibi_slopes(config.heads, config.alibi_bias_max, query_btne.device)
        slopes_n = all_slopes[first_head : first_head + heads]
    tokens = query_btne.shape[1] * group.size()
    window = context.window if context.window < tokens else 0
    masks = RingMasks(group, window, slopes_n, context.documents_rbt, context.scale, context.softcap)
    parts = (each.transpose(1, 2) for each in (query_btne, key_btge, value_btge))
    mixed: Tensor = _RingAttention.apply(*parts, sinks_n, masks)  # type: ignore[no-untyped-call]
    return mixed.transpose(1, 2)


@dataclass(frozen=True)
class RingMasks:
    """The processes that share a row, and what decides which tokens attend to which in addition to their order."""

    group: dist.ProcessGroup
    window: int
    slopes_n: Tensor | None
    documents_rbt: Tensor | None
    """Documents of every process's tokens."""
    scale: float | None
    """What scores are multiplied by; None is 1 / √e."""
    softcap: float
    """Scores stay within ± this; 0 for no bound."""

    def pairs(self, source: int, half: int) -> Iterator[tuple[slice, slice, BlockMask]]:
        """Our pieces of `half` queries and the pieces of keys of process `source` that they reach, with their masks.

        Of our own keys, each piece's come first: after them every query has attended to itself at least.
        """
        rank, last, documents_rbt = self.group.rank(), 2 * self.group.size() - 1, self.documents_rbt
        early, late = slice(0, half), slice(half, 2 * half)
        pieces = [(early, rank), (late, last - rank)], [(early, source), (late, last - source)]
        reached = [
            (queries, keys, distance)
            for queries, query_piece in pieces[0]
            for keys, key_piece in pieces[1]
            if (distance := (query_piece - key_piece) * half) >= 0
            and not (self.window and distance - half >= self.window - 1)
        ]
        for queries, keys, distance in sorted(reached, key=lambda pair: pair[2]):
            yield (
                queries,
                keys,
                BlockMask(
                    distance=distance,
                    slopes_n=self.slopes_n,
                    query_documents_bt=None if documents_rbt is None else documents_rbt[rank][:, queries],
                    key_documents_bs=None if documents_rbt is None else documents_rbt[source][:, keys],
                    window=self.window,
                ),
            )


@dataclass(frozen=True)
class _Passing:
    """A tensor on its way; the sent one is kept alive until it has left."""

    sent: Tensor
    received: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """What arrived."""
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> _Passing:
    """Start sending a tensor to the next process and receiving its like from the one before."""
    received = torch.empty_like(tensor)
    ahead, behind = (dist.get_global_rank(group, (group.rank() + step) % group.size()) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, tensor, ahead, group), dist.P2POp(dist.irecv, received, behind, group)]
    return _Passing(tensor, received, dist.batch_isend_irecv(operations))


class _RingAttention(torch.autograd.Function):
    """Attention of our queries [b, n, t, e] to the keys and values [b, g, t, e] of every process in the ring.

    A sink is one more key of each query, of value zero: it has a share of the softmax and adds nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_n: Tensor | None, masks: RingMasks
    ) -> Tensor:
        mixed, lse_bnt = _merge_all(query, torch.stack([key, value]), masks)
        if sinks_n is not None:
            with_sinks_bnt = torch.logaddexp(lse_bnt, sinks_n.float()[:, None])
            mixed = mixed * torch.exp(lse_bnt - with_sinks_bnt)[..., None]
            lse_bnt = with_sinks_bnt
        mixed_out = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks_n, mixed_out, lse_bnt)
        ctx.masks = masks
        return mixed_out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        query, key, value, sinks_n, mixed, lse_bnt = ctx.saved_tensors
        key_value = torch.stack([key, value])
        by_query, by_key_value = _all_gradients(query, key_value, mixed, lse_bnt, grad_outputs[0], ctx.masks)
        by_key, by_value = by_key_value.to(key.dtype).unbind()
        by_sinks = None
        if sinks_n is not None:
            # The softmax takes the row's mean gradient from each key's; a sink's own, for a value of zero, is zero.
            mean_bnt = (grad_outputs[0].float() * mixed.float()).sum(dim=-1)
            share_bnt = torch.exp(sinks_n.float()[:, None] - lse_bnt)
            by_sinks = -(share_bnt * mean_bnt).sum(dim=(0, 2)).to(sinks_n.dtype)
        return by_query.to(query.dtype), by_key, by_value, by_sinks, None


def _merge_all(query: Tensor, key_value: Tensor, masks: RingMasks) -> tuple[Tensor, Tensor]:
    mixed = torch.zeros_like(query, dtype=torch.float32)
    lse = torch.full(query.shape[:3], float("-inf"), device=query.device)
    group = masks.group
    for round_number in range(group.size()):
        passing = _pass_on(key_value, group) if round_number < group.size() - 1 else None
        for block, queries, _ in _blocks(query, key_value, (group.rank() - round_number) % group.size(), masks):
            block_mixed, block_lse = attend_block(block)
            before = lse[:, :, queries]
            together = torch.logaddexp(before, block_lse)
            kept, added = torch.exp(before - together)[..., None], torch.exp(block_lse - together)[..., None]
            mixed[:, :, queries] = mixed[:, :, queries] * kept + block_mixed * added
            lse[:, :, queries] = together
        if passing is not None:
            key_value = passing.wait()
    return mixed, lse


def _all_gradients(
    query: Tensor, key_value: Tensor, mixed: Tensor, lse: Tensor, mixed_grad: Tensor, masks: RingMasks
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values travel with them, collect a part at each process, and end where they belong."""
    by_query = torch.zeros_like(query, dtype=torch.float32)
    returning: _Passing | None = None
    group = masks.group
    for round_number in range(group.size()):
        passing = _pass_on(key_value, group) if round_number < group.size() - 1 else None
        groups = key_value.shape[2]
        gradients = [
            (block_gradients(block, mixed[:, :, queries], lse[:, :, queries], mixed_grad[:, :, queries]), queries, keys)
            for block, queries, keys in _blocks(query, key_value, (group.rank() - round_number) % group.size(), masks)
        ]
        collected = torch.zeros_like(key_value, dtype=torch.float32) if returning is None else returning.wait()
        for parts, queries, keys in gradients:
            by_query[:, :, queries] += parts[0]
            for index, part in enumerate(parts[1:]):
                # Query heads that share a key-value head each have a part in its gradient.
                collected[index][:, :, keys] += part.unflatten(1, (groups, -1)).sum(dim=2)
        returning = _pass_on(collected, group)
        if passing is not None:
            key_value = passing.wait()
    assert returning is not None
    return by_query, returning.wait()


def _blocks(query: Tensor, key_value: Tensor, source: int, masks: RingMasks) -> Iterator[tuple[Block, slice, slice]]:
    """What our queries have to do with the keys of process `source`, and which queries and keys take part."""
    half, everything, rank = query.shape[2] // 2, slice(None), masks.group.rank()
    repeats = query.shape[1] // key_value.shape[2]
    key, value = key_value.repeat_interleave(repeats, dim=2).unbind() if repeats > 1 else key_value.unbind()
    scores = (masks.scale, masks.softcap)
    if masks.window or masks.slopes_n is not None or masks.documents_rbt is not None:
        for queries, keys, mask in masks.pairs(source, half):
            parts = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
            yield Block(*parts, False, mask, *scores), queries, keys
        return
    queries = slice(half, None) if source > rank else everything
    keys = slice(0, half) if source < rank else everything
    parts = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
    yield Block(*parts, source == rank, None, *scores), queries, keys
