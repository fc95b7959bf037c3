"""Which pairs of queries and keys are visible in packed documents and sliding windows, and who computes them.

Documents and windows are one rule: a query sees the keys from its first one up to itself. Along a row the first key
never decreases, so each block of keys is seen by one run of queries. The backward kernels skip everything else. The
length of a run changes from batch to batch, so the GPU deals out the work itself: nothing waits for the host.

Shape legend: b rows, t tokens, k blocks of 128 keys in a row, g key-value heads, i items = b·g·k, p multiprocessors.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import Kernel, compile_source, source_of

KEYS, QUERIES = 128, 64
"""Keys of an item and queries of one of its steps, as in attention_backward.cu."""
_LAST_HEADS = 10
"""Key-value heads whose items are scheduled longest first, so that all multiprocessors end together. Before them the
items of one head follow those of another, so that a head's queries stay in the cache."""
_ITEM_COST, _STEP_COST = 1, 2
"""The start and end of an item cost half a step."""


class BlockMask(NamedTuple):
    """The visible part of the scores, for the kernels of one kind of layer; made once a forward."""

    first_key_bt: Tensor
    """The first key in the row that a query sees, int32."""
    query_ends_bk: Tensor
    """Where the queries end that see a block of keys, in steps of 64 queries, int32."""
    lists_pi: Tensor
    """The items of each multiprocessor, then -1; empty on devices without the kernels."""


def make_block_mask(cu_seqlens: Tensor, rows: int, tokens: int, window: int, groups: int) -> BlockMask:
    """For documents that start at `cu_seqlens` in rows laid end to end, and a window of the latest tokens (0: none)."""
    index_bt = torch.arange(rows * tokens, dtype=torch.int32, device=cu_seqlens.device).view(rows, tokens)
    document_bt = torch.searchsorted(cu_seqlens, index_bt, right=True) - 1
    first_key_bt = cu_seqlens[document_bt] - index_bt[:, :1]
    if window:
        first_key_bt = torch.maximum(first_key_bt, index_bt[:1] - (window - 1))
    last_key_k = index_bt.flatten()[: tokens // KEYS] * KEYS + (KEYS - 1)
    queries_bk = torch.searchsorted(first_key_bt, last_key_k.expand(rows, -1).contiguous(), right=True)
    query_ends_bk = ((queries_bk + QUERIES - 1) // QUERIES).int()
    return BlockMask(first_key_bt.contiguous(), query_ends_bk, attention_lists(query_ends_bk, groups))


def item_costs(query_ends_bk: Tensor, groups: int) -> Tensor:
    """Of all items, in half steps, int32."""
    blocks = query_ends_bk.shape[1]
    starts_k = torch.arange(blocks, dtype=torch.int32, device=query_ends_bk.device) * (KEYS // QUERIES)
    costs_bk = (query_ends_bk - starts_k) * _STEP_COST + _ITEM_COST
    return costs_bk.repeat_interleave(groups, dim=0).flatten()


def item_order(costs_i: Tensor, blocks: int) -> Tensor:
    """In which order items are dealt out, int32: item h·k + j is block j of keys of head h."""
    late = max(0, costs_i.shape[0] // blocks - _LAST_HEADS) * blocks
    last_i = costs_i[late:].argsort(descending=True, stable=True) + late
    return torch.cat((torch.arange(late, device=costs_i.device), last_i)).int()


def schedule_items(order: Sequence[int], costs: Sequence[int], processors: int) -> list[list[int]]:
    """Items in order, each to the processor that is free first."""
    lists: list[list[int]] = [[] for _ in range(processors)]
    free = [(0, processor) for processor in range(processors)]
    for item in order:
        when, processor = heapq.heappop(free)
        lists[processor].append(item)
        heapq.heappush(free, (when + costs[item], processor))
    return lists


def plain_lists(rows: int, groups: int, tokens: int, processors: int) -> list[list[int]]:
    """The schedule where every query sees all keys before it."""
    query_ends_bk = torch.full((rows, tokens // KEYS), tokens // QUERIES, dtype=torch.int32, device="cpu")
    costs_i = item_costs(query_ends_bk, groups)
    return schedule_items(item_order(costs_i, tokens // KEYS).tolist(), costs_i.tolist(), processors)


@torch.library.custom_op("keepstep::attention_lists", mutates_args=())
def attention_lists(query_ends_bk: Tensor, groups: int) -> Tensor:
    """What `schedule_items` gives, computed on the GPU: [p, i + 1]."""
    if not query_ends_bk.is_cuda:
        return query_ends_bk.new_empty((0, 0))
    device, blocks = query_ends_bk.device, query_ends_bk.shape[1]
    costs_i = item_costs(query_ends_bk, groups)
    order_i = item_order(costs_i, blocks)
    lists_pi = torch.empty((processors_of(device), costs_i.shape[0] + 1), dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        _kernel(device).launch(1, 32, order_i, costs_i, lists_pi, costs_i.shape[0], lists_pi.shape[0])
    return lists_pi


@attention_lists.register_fake
def _(query_ends_bk: Tensor, groups: int) -> Tensor:
    if query_ends_bk.device.type != "cuda":
        return query_ends_bk.new_empty((0, 0))
    return query_ends_bk.new_empty((processors_of(query_ends_bk.device), query_ends_bk.numel() * groups + 1))


def processors_of(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(device: torch.device) -> Kernel:
    return Kernel(compile_source(source_of("hopper", "attention_schedule")), "attention_schedule", 0, device)
