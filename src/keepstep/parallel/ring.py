"""Ring attention: keys and values travel round the processes that share a row, and each attends to what passes by.

Shape legend: b rows, t tokens on this process, n query heads, g key-value heads, e head size.

Rows are cut zigzag: of 2c pieces process r holds piece r and piece 2c-1-r. The early piece attends to little, the late
one to much, so that under a causal mask all processes have equal work at every turn of the ring:
- keys of an earlier process: all our queries attend to its early piece, none to its late one;
- keys of a later process: our late queries attend to both its pieces, our early ones to none;
- our own keys: plain causal attention, since our two pieces are in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.parallel.block_attention import Block, BlockMask, attend_block, block_gradients


@dataclass(frozen=True)
class Ring:
    """The processes that share a row, and our place among them."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Processes in the ring."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Our place."""
        return self.group.rank()

    def pass_on(self, tensor: Tensor) -> Passing:
        """Start sending a tensor to the next process and receiving its like from the one before."""
        received = torch.empty_like(tensor)
        ahead = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        behind = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        operations = [
            dist.P2POp(dist.isend, tensor, ahead, self.group),
            dist.P2POp(dist.irecv, received, behind, self.group),
        ]
        return Passing(tensor, received, dist.batch_isend_irecv(operations))


@dataclass(frozen=True)
class Passing:
    """A tensor on its way; the sent one is kept alive until it has left."""

    sent: Tensor
    received: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """What arrived."""
        for work in self.works:
            work.wait()
        return self.received


def own_places(tokens: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Which tokens of the row process `rank` holds, in its order; `tokens` is the number it holds."""
    half_t = torch.arange(tokens // 2, device=device)
    return torch.cat([half_t + rank * len(half_t), half_t + (2 * size - 1 - rank) * len(half_t)])


@dataclass(frozen=True)
class RingMasks:
    """What decides, beside the order of tokens, who may attend to whom: the same for all blocks of a forward."""

    window: int
    slopes_n: Tensor | None
    documents_rbt: Tensor | None
    """Documents of every process's tokens."""

    def between(self, ring: Ring, source: int, block: Block) -> BlockMask | None:
        """The mask of our queries against the keys of process `source`; None where order says it all."""
        if not self.window and self.slopes_n is None and self.documents_rbt is None:
            return None
        tokens, device = block.query.shape[2], block.query.device
        return BlockMask(
            query_places_t=own_places(tokens, ring.rank, ring.size, device),
            key_places_s=own_places(tokens, source, ring.size, device),
            slopes_n=self.slopes_n,
            query_documents_bt=None if self.documents_rbt is None else self.documents_rbt[ring.rank],
            key_documents_bs=None if self.documents_rbt is None else self.documents_rbt[source],
            window=self.window,
        )


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, masks: RingMasks) -> Tensor:
    """Attention of our queries [b, n, t, e] to the keys and values [b, g, t, e] of every process in the ring."""
    mixed: Tensor = _RingAttention.apply(query, key, value, ring, masks)  # type: ignore[no-untyped-call]
    return mixed


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, masks: RingMasks) -> Tensor:
        mixed, lse = _merge_all(query, torch.stack([key, value]), ring, masks)
        mixed_out = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed_out, lse)
        ctx.ring, ctx.masks = ring, masks
        return mixed_out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        query, key, value, mixed, lse = ctx.saved_tensors
        by_query, by_key_value = _all_gradients(
            query, torch.stack([key, value]), mixed, lse, grad_outputs[0], ctx.ring, ctx.masks
        )
        by_key, by_value = by_key_value.to(key.dtype).unbind()
        return by_query.to(query.dtype), by_key, by_value, None, None


def _merge_all(query: Tensor, key_value: Tensor, ring: Ring, masks: RingMasks) -> tuple[Tensor, Tensor]:
    mixed = lse = torch.empty(0)
    for turn in range(ring.size):
        passing = ring.pass_on(key_value) if turn < ring.size - 1 else None
        block, queries, _ = _block(query, key_value, ring, (ring.rank - turn) % ring.size, masks)
        block_mixed, block_lse = attend_block(block)
        if turn == 0:
            # Every token attends to itself at least: from here on the sums are finite.
            mixed, lse = block_mixed.clone(), block_lse.clone()
        else:
            before = lse[:, :, queries]
            together = torch.logaddexp(before, block_lse)
            kept, added = torch.exp(before - together)[..., None], torch.exp(block_lse - together)[..., None]
            mixed[:, :, queries] = mixed[:, :, queries] * kept + block_mixed * added
            lse[:, :, queries] = together
        if passing is not None:
            key_value = passing.wait()
    return mixed, lse


def _all_gradients(
    query: Tensor, key_value: Tensor, mixed: Tensor, lse: Tensor, mixed_grad: Tensor, ring: Ring, masks: RingMasks
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values travel with them, collect a part at each process, and end where they belong."""
    by_query = torch.zeros_like(query, dtype=torch.float32)
    returning: Passing | None = None
    for turn in range(ring.size):
        passing = ring.pass_on(key_value) if turn < ring.size - 1 else None
        block, queries, keys = _block(query, key_value, ring, (ring.rank - turn) % ring.size, masks)
        parts = block_gradients(block, mixed[:, :, queries], lse[:, :, queries], mixed_grad[:, :, queries])
        by_query[:, :, queries] += parts[0]
        groups = key_value.shape[2]
        collected = torch.zeros_like(key_value, dtype=torch.float32) if returning is None else returning.wait()
        for index, part in enumerate(parts[1:]):
            # Query heads that share a key-value head each have a part in its gradient.
            collected[index][:, :, keys] += part.unflatten(1, (groups, -1)).sum(dim=2)
        returning = ring.pass_on(collected)
        if passing is not None:
            key_value = passing.wait()
    assert returning is not None
    return by_query, returning.wait()


def _block(query: Tensor, key_value: Tensor, ring: Ring, source: int, masks: RingMasks) -> tuple[Block, slice, slice]:
    """What our queries have to do with the keys of process `source`, and which queries and keys take part."""
    half, everything = query.shape[2] // 2, slice(None)
    repeats = query.shape[1] // key_value.shape[2]
    key, value = key_value.repeat_interleave(repeats, dim=2).unbind() if repeats > 1 else key_value.unbind()
    block = Block(query, key, value, causal=source == ring.rank, mask=None)
    mask = masks.between(ring, source, block)
    queries = slice(half, None) if source > ring.rank else everything
    keys = slice(0, half) if source < ring.rank else everything
    if mask is not None:
        mask = replace(
            mask,
            query_places_t=mask.query_places_t[queries],
            key_places_s=mask.key_places_s[keys],
            query_documents_bt=None if mask.query_documents_bt is None else mask.query_documents_bt[:, queries],
            key_documents_bs=None if mask.key_documents_bs is None else mask.key_documents_bs[:, keys],
        )
    return (
        Block(query[:, :, queries], key[:, :, keys], value[:, :, keys], block.causal, mask),
        queries,
        keys,
    )
