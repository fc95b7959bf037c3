"""Launches the kernels of attention_backward.cu: the backward pass of causal attention, rope included.

Shape legend: b rows, t tokens, n query heads, g key-value heads, e numbers a head, m rows of the fused projection,
f = e/2 rotary frequencies.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import Kernel, compile_source, source_of, tensor_map

HEAD_SIZES = (64, 128)
_KEYS, _QUERIES, _COLUMNS = 128, 64, 64
_THREADS = 384
_STATS_TOKENS, _STATS_THREADS, _LIMITS_TOKENS = 16, 256, 512
_LAST_HEADS = 10
"""Key-value heads whose items are scheduled longest first, so that all multiprocessors end together. Before them the
items of one head follow those of another, so that a head's queries stay in the cache."""
_ITEM_COST = 0.5
"""The start and end of an item, in steps of 64 queries."""


@dataclass(frozen=True)
class SavedAttention:
    """What the forward pass saves: all of it contiguous, in bf16 except for the log-sum-exp."""

    query_btne: Tensor
    key_btge: Tensor
    value_btge: Tensor
    attn_out_btne: Tensor
    lse_bnt: Tensor
    """The fp32 log-sum-exp of each softmax."""


def supports(tokens: int, head_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support rows of this many tokens."""
    return head_size in HEAD_SIZES and tokens > 0 and tokens % _KEYS == 0 and dtype == torch.bfloat16


def attention_backward_kernels(
    gradient_btne: Tensor, saved: SavedAttention, tables: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The gradient [b, t, m] of the fused projection.

    `tables` are the fp32 cosines and sines [1 or b, t, f] of rope.
    """
    b, t, n, e = gradient_btne.shape
    g, device = saved.key_btge.shape[2], gradient_btne.device
    limits = torch.zeros((b, g, 2), dtype=torch.int32, device=device)
    stats, scales = (torch.empty((b, n, t, 2), dtype=torch.float32, device=device) for _ in range(2))
    query_sums = torch.zeros((b, n, t, e), dtype=torch.int32, device=device)
    fused_btm = gradient_btne.new_empty((b, t, (n + 2 * g) * e))
    cosines, sines = tables or (None, None)
    table_rows = t if cosines is None else cosines.shape[0] * t
    maps = [tensor_map(x, (n * e, b * t), (n * e,), (_COLUMNS, _QUERIES)) for x in (saved.query_btne, gradient_btne)]
    maps += [tensor_map(x, (g * e, b * t), (g * e,), (_COLUMNS, _KEYS)) for x in (saved.key_btge, saved.value_btge)]
    with torch.cuda.device(device):
        limits_kernel, stats_kernel, backward_kernel, queries_kernel = _kernels(e, device)
        lists = _lists(b * g, t // _KEYS, device)
        limits_kernel.launch(
            b * g * -(-t // _LIMITS_TOKENS), _STATS_THREADS, saved.key_btge, saved.value_btge, limits, t, g
        )
        stats_kernel.launch(
            b * t // _STATS_TOKENS, _STATS_THREADS,
            saved.attn_out_btne, gradient_btne, saved.lse_bnt, limits, stats, scales, t, n, g,
        )  # fmt: skip
        backward_kernel.launch(
            lists.shape[0], _THREADS, *maps, stats, scales, query_sums, fused_btm, cosines, sines, lists,
            lists.shape[1], table_rows, t, n, g,
        )  # fmt: skip
        queries_kernel.launch(
            b * g * t // _QUERIES, 128, query_sums, scales, fused_btm, cosines, sines, table_rows, t, n, g
        )
    return fused_btm


@functools.cache
def _kernels(head_size: int, device: torch.device) -> list[Kernel]:
    code = compile_source(source_of("hopper", "attention_backward").replace("@HEAD@", str(head_size)))
    shared_bytes = {"limits": 0, "stats": 0, "backward": _shared_bytes(head_size), "queries": 0}
    return [Kernel(code, f"attention_{name}", size, device) for name, size in shared_bytes.items()]


def _shared_bytes(head_size: int) -> int:
    """Keys, values, queries, gradients, scores, partial sums, statistics and barriers: as in attention_backward.cu."""
    slots, stages = (2, 4) if head_size == 64 else (1, 3)
    keys_bytes, queries_bytes = _KEYS * head_size * 2, _QUERIES * head_size * 2
    scores_bytes, part_bytes = _KEYS * _QUERIES * 2, _QUERIES * (64 if head_size == 64 else 32) * 4
    tiles = 2 * slots * keys_bytes + 2 * stages * queries_bytes + 2 * scores_bytes + 2 * part_bytes
    return tiles + stages * 2 * _QUERIES * 4 + 128


@functools.lru_cache(maxsize=16)
def _lists(heads: int, blocks: int, device: torch.device) -> Tensor:
    """The items of each multiprocessor, then -1: item h·blocks + k is block k of keys of head h."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    lists = schedule_items(heads, blocks, processors)
    width = max(map(len, lists)) + 1
    return torch.tensor([[*items, *[-1] * (width - len(items))] for items in lists], dtype=torch.int32, device=device)


def schedule_items(heads: int, blocks: int, processors: int) -> list[list[int]]:
    """Items in order, each to the processor that is free first; the first keys are seen by most queries."""
    late = max(0, heads - _LAST_HEADS)
    order = [head * blocks + block for head in range(late) for block in range(blocks)]
    order += [head * blocks + block for block in range(blocks) for head in range(late, heads)]
    lists: list[list[int]] = [[] for _ in range(processors)]
    free = [(0.0, processor) for processor in range(processors)]
    for item in order:
        when, processor = heapq.heappop(free)
        lists[processor].append(item)
        heapq.heappush(free, (when + 2 * (blocks - item % blocks) + _ITEM_COST, processor))
    return lists
