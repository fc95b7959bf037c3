"""Launches the kernels of attention_backward.cu: the backward pass of causal attention, rope included.

Shape legend: b rows, t tokens, n query heads, g key-value heads, e numbers a head, m rows of the fused projection,
f = e/2 rotary frequencies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.attention_schedule import KEYS, QUERIES, BlockMask, plain_lists, processors_of
from keepstep.models.kernels.cuda import Kernel, compile_source, source_of, tensor_map

HEAD_SIZES = (64, 128)
_PADDED_FROM = 96
"""Heads from this size on are computed as heads of 128: smaller ones would be padding for the most part."""
THREADS = {64: 512, 128: 384}
"""Of a block of the main kernel, by head size: four warpgroups or three."""
_COLUMNS = 64
_STATS_TOKENS, _STATS_THREADS, _LIMITS_TOKENS = 16, 256, 512


@dataclass(frozen=True)
class SavedAttention:
    """What the forward pass saves: all of it contiguous, in bf16 except for the log-sum-exp."""

    query_btne: Tensor
    key_btge: Tensor
    value_btge: Tensor
    attn_out_btne: Tensor
    lse_bnt: Tensor
    """The fp32 log-sum-exp of each softmax."""
    scale: float | None = None
    """What scores were multiplied by; None is 1 / √e."""


def is_padded(head_size: int) -> bool:
    """Whether heads of this size are filled up with zeros to the next one that has a kernel."""
    return _PADDED_FROM <= head_size < HEAD_SIZES[-1] and head_size % 8 == 0


def supports(tokens: int, head_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support rows of this many tokens."""
    has_size = head_size in HEAD_SIZES or is_padded(head_size)
    return has_size and tokens > 0 and tokens % KEYS == 0 and dtype == torch.bfloat16


def attention_backward_kernels(
    gradient_btne: Tensor,
    saved: SavedAttention,
    tables: tuple[Tensor, Tensor] | None,
    mask: BlockMask | None = None,
) -> Tensor:
    """The gradient [b, t, m] of the fused projection.

    `tables` are the fp32 cosines and sines [1 or b, t, f] of rope, which padded heads must not have. Without a mask a
    query sees all keys before it.
    """
    if is_padded(gradient_btne.shape[3]):
        assert tables is None
        return _with_padded_heads(gradient_btne, saved, mask)
    b, t, n, e = gradient_btne.shape
    g, device = saved.key_btge.shape[2], gradient_btne.device
    stats, scales = (torch.empty((b, n, t, 2), dtype=torch.float32, device=device) for _ in range(2))
    sizes = (b * n * t * e, b * g * 2)
    query_sums, limits = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    fused_btm = gradient_btne.new_empty((b, t, (n + 2 * g) * e))
    cosines, sines = tables or (None, None)
    table_rows = t if cosines is None else cosines.shape[0] * t
    maps = [tensor_map(x, (n * e, b * t), (n * e,), (_COLUMNS, QUERIES)) for x in (saved.query_btne, gradient_btne)]
    maps += [tensor_map(x, (g * e, b * t), (g * e,), (_COLUMNS, KEYS)) for x in (saved.key_btge, saved.value_btge)]
    with torch.cuda.device(device):
        kernels = _kernels(e, mask is not None, saved.scale or e**-0.5, device)
        limits_kernel, stats_kernel, backward_kernel, queries_kernel = kernels
        first_keys, ends, lists = mask or (None, None, _lists(b, g, t, device))
        limits_kernel.launch(
            b * g * -(-t // _LIMITS_TOKENS), _STATS_THREADS, saved.key_btge, saved.value_btge, limits, t, g
        )
        stats_kernel.launch(
            b * t // _STATS_TOKENS, _STATS_THREADS,
            saved.attn_out_btne, gradient_btne, saved.lse_bnt, limits, stats, scales, t, n, g,
        )  # fmt: skip
        backward_kernel.launch(
            lists.shape[0], THREADS[e], *maps, stats, scales, query_sums, fused_btm, cosines, sines, lists,
            lists.shape[1], first_keys, ends, table_rows, t, n, g,
        )  # fmt: skip
        queries_kernel.launch(
            b * g * t // QUERIES, 128, query_sums, scales, fused_btm, cosines, sines, table_rows, t, n, g
        )
    return fused_btm


def _with_padded_heads(gradient_btne: Tensor, saved: SavedAttention, mask: BlockMask | None) -> Tensor:
    """Zeros at the end of every head change neither scores nor the gradients of what is before them."""
    size = gradient_btne.shape[3]

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, HEAD_SIZES[-1] - size))

    query, key, value = padded(saved.query_btne), padded(saved.key_btge), padded(saved.value_btge)
    wide = SavedAttention(query, key, value, padded(saved.attn_out_btne), saved.lse_bnt, saved.scale or size**-0.5)
    fused_btm = attention_backward_kernels(padded(gradient_btne), wide, None, mask)
    own_btm: Tensor = fused_btm.unflatten(-1, (-1, HEAD_SIZES[-1]))[..., :size].flatten(2)
    return own_btm


def backward_files(head_size: int) -> tuple[str, str]:
    """What both head sizes share, then the kernel of one: they differ in what runs at the same time."""
    return "attention_backward", f"attention_backward_{head_size}"


def kernel_source(files: Sequence[str], head_size: int, masked: bool, scale: float) -> str:
    """The source of one variant."""
    source = source_of(*files)
    for name, value in {"HEAD": str(head_size), "MASKED": str(masked).lower(), "ROOT": f"{scale:.9e}"}.items():
        source = source.replace(f"@{name}@", value)
    return source


@functools.cache
def _kernels(head_size: int, masked: bool, scale: float, device: torch.device) -> list[Kernel]:
    files = ("hopper", "attention_instructions", *backward_files(head_size), "attention_passes")
    code = compile_source(kernel_source(files, head_size, masked, scale))
    shared_bytes = {"limits": 0, "stats": 0, "backward": _shared_bytes(head_size, masked), "queries": 0}
    return [Kernel(code, f"attention_{name}", size, device) for name, size in shared_bytes.items()]


def _shared_bytes(head_size: int, masked: bool) -> int:
    """Keys, values, queries, gradients, scores, partial sums, statistics and barriers: as in attention_backward.cu."""
    slots, stages = (2, 4) if head_size == 64 else (1, 3)
    keys_bytes, queries_bytes = KEYS * head_size * 2, QUERIES * head_size * 2
    scores_bytes, part_bytes = KEYS * QUERIES * 2, QUERIES * _COLUMNS * 4
    tiles = 2 * slots * keys_bytes + 2 * stages * queries_bytes + 2 * scores_bytes + 2 * part_bytes
    return tiles + stages * (3 if masked else 2) * QUERIES * 4 + 192


@functools.lru_cache(maxsize=16)
def _lists(rows: int, groups: int, tokens: int, device: torch.device) -> Tensor:
    """The items of each multiprocessor for plain causal rows, then -1."""
    lists = plain_lists(rows, groups, tokens, processors_of(device))
    width = max(map(len, lists)) + 1
    return torch.tensor([[*items, *[-1] * (width - len(items))] for items in lists], dtype=torch.int32, device=device)
