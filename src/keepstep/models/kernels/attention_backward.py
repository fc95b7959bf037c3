"""Starting the kernels of attention_backward.cu: what causal attention passes back, turned back on the way.

Shape legend: b rows, t tokens, n query heads, g key-value heads, e = 64 numbers a head, m rows of the fused projection,
f = e/2 rotary frequencies.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import Kernel, compile_source, source_of, tensor_map

HEAD_SIZE = 64
_KEYS, _QUERIES = 128, 64
_THREADS = 384
_SHARED_BYTES = 12 * _KEYS * HEAD_SIZE * 2 + 4 * 2 * _QUERIES * 4 + 128
"""Keys, values, queries, gradients, scores and partial sums; what the softmax takes off; barriers."""
_STATS_TOKENS, _STATS_THREADS = 16, 256
_LAST_HEADS = 10
"""Key-value heads whose work is dealt out longest first, for all multiprocessors to end together. Before them one
head's is dealt out after another's, for its queries to stay in the cache."""
_ITEM_COST = 0.5
"""Beginning and ending a piece of work, in steps of 64 queries."""


@dataclass(frozen=True)
class Attended:
    """What a forward pass leaves behind: all of it contiguous, in bf16 but for the logarithms."""

    query_btne: Tensor
    key_btge: Tensor
    value_btge: Tensor
    mixed_btne: Tensor
    normalisers_bnt: Tensor
    """The fp32 logarithm of each softmax's sum."""


def takes(tokens: int, head_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can be asked for rows of this many tokens."""
    return head_size == HEAD_SIZE and tokens > 0 and tokens % _KEYS == 0 and dtype == torch.bfloat16


def fused_gradient(gradient_btne: Tensor, attended: Attended, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """The gradient [b, t, m] of the fused projection.

    `tables` are the fp32 cosines and sines [1 or b, t, f] that queries and keys were turned by.
    """
    b, t, n, e = gradient_btne.shape
    g, device = attended.key_btge.shape[2], gradient_btne.device
    stats = torch.empty((b, n, t, 2), dtype=torch.float32, device=device)
    query_sums = torch.zeros((b, n, t, e), dtype=torch.float32, device=device)
    fused_btm = gradient_btne.new_empty((b, t, (n + 2 * g) * e))
    cosines, sines = tables or (None, None)
    table_rows = t if cosines is None else cosines.shape[0] * t
    maps = [tensor_map(x, (n * e, b * t), (n * e,), (e, _QUERIES)) for x in (attended.query_btne, gradient_btne)]
    maps += [tensor_map(x, (g * e, b * t), (g * e,), (e, _KEYS)) for x in (attended.key_btge, attended.value_btge)]
    with torch.cuda.device(device):
        kernels = _kernels(device)
        lists = _lists(b * g, t // _KEYS, device)
        kernels.stats.launch(
            b * t // _STATS_TOKENS, _STATS_THREADS,
            attended.mixed_btne, gradient_btne, attended.normalisers_bnt, stats, t, n,
        )  # fmt: skip
        kernels.back.launch(
            lists.shape[0], _THREADS, *maps, stats, query_sums, fused_btm, cosines, sines, lists,
            lists.shape[1], table_rows, t, n, g,
        )  # fmt: skip
        kernels.queries.launch(b * g * t // _QUERIES, 128, query_sums, fused_btm, cosines, sines, table_rows, t, n, g)
    return fused_btm


@dataclass(frozen=True)
class _Kernels:
    stats: Kernel
    back: Kernel
    queries: Kernel


@functools.cache
def _kernels(device: torch.device) -> _Kernels:
    code = compile_source(source_of("hopper", "attention_backward"))
    return _Kernels(
        Kernel(code, "attention_stats", 0, device),
        Kernel(code, "attention_backward", _SHARED_BYTES, device),
        Kernel(code, "attention_queries", 0, device),
    )


@functools.lru_cache(maxsize=16)
def _lists(heads: int, blocks: int, device: torch.device) -> Tensor:
    """For each multiprocessor the pieces of work it does, and -1: piece h·blocks + k is block k of keys of head h."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    lists = deal_out(heads, blocks, processors)
    width = max(map(len, lists)) + 1
    return torch.tensor(
        [[*pieces, *[-1] * (width - len(pieces))] for pieces in lists], dtype=torch.int32, device=device
    )


def deal_out(heads: int, blocks: int, hands: int) -> list[list[int]]:
    """Pieces of work in order, each to whoever is done first; the first keys are seen by most queries."""
    late = max(0, heads - _LAST_HEADS)
    order = [head * blocks + block for head in range(late) for block in range(blocks)]
    order += [head * blocks + block for block in range(blocks) for head in range(late, heads)]
    lists: list[list[int]] = [[] for _ in range(hands)]
    done = [(0.0, hand) for hand in range(hands)]
    for piece in order:
        when, hand = heapq.heappop(done)
        lists[hand].append(piece)
        heapq.heappush(done, (when + 2 * (blocks - piece % blocks) + _ITEM_COST, hand))
    return lists
