"""Attention inside packed documents by the flash kernel's own notion of them: pairs across two are never computed.

A mask says the same at the price of rows × tokens² numbers, and of every pair that it then forgets.

Shape legend: b rows, t tokens, n query heads, g key-value heads, e head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F


def document_bounds(documents_bt: NDArray[Any]) -> NDArray[np.int32]:
    """Where documents start in the rows laid end to end, then the end of all.

    The end is repeated until the count of bounds is a power of two and one: compiled blocks see few lengths, and a
    document without tokens costs next to nothing.
    """
    starts_bt = np.ones(documents_bt.shape, dtype=bool)
    starts_bt[:, 1:] = documents_bt[:, 1:] != documents_bt[:, :-1]
    starts = np.flatnonzero(starts_bt)
    room = 1 << (len(starts) - 1).bit_length()
    bounds = np.full(room + 1, documents_bt.size, dtype=np.int32)
    bounds[: len(starts)] = starts
    return bounds


def attend_documents(query_btne: Tensor, key_btge: Tensor, value_btge: Tensor, bounds: Tensor) -> Tensor:
    """Causal attention inside each document, [b, t, n, e]."""
    query, key, value = (part.flatten(0, 1) for part in (query_btne, key_btge, value_btge))
    rows, tokens = query_btne.shape[:2]
    mixed = _flash(query, key, value, bounds, tokens) if query.is_cuda else _plain(query, key, value, bounds)
    return mixed.view(rows, tokens, *query.shape[1:])


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, is_causal=True, return_debug_mask=False
    )
    mixed: Tensor = found[0]
    return mixed


def _plain(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """Document by document, for devices without the kernel."""
    edges = bounds.tolist()
    lengths = [end - start for start, end in pairwise(edges) if end > start]
    heads_first = (part.transpose(0, 1)[None].split(lengths, dim=2) for part in (query, key, value))
    shared = query.shape[1] != key.shape[1]
    mixed = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        for q, k, v in zip(*heads_first, strict=True)
    ]
    return torch.cat(mixed, dim=2)[0].transpose(0, 1)
