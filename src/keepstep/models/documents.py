"""Attention inside packed documents by the flash kernel's own notion of them: pairs across two are never computed.

A mask says the same at the price of rows × tokens² numbers, and of every pair that it then forgets.

Shape legend: b rows, t tokens, n query heads, g key-value heads, e head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

_TILE = 128
"""Tokens the kernel takes at once: shorter documents cost as much."""

_MOST_FILLING = 8
"""Times the tokens themselves: documents of 16 tokens or more. A mask is smaller than what shorter ones would take."""


class Bounds(NamedTuple):
    """Where documents lie in the rows laid end to end."""

    edges: Tensor
    """What `document_bounds` found, on the device of the queries."""
    longest: int
    """No document has more tokens: the kernel looks no further for work in any of them."""


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


def are_few(bounds: NDArray[np.int32]) -> bool:
    """Whether the kernel has room for so many documents: its backward pass fills each one up by a tile, in fp32."""
    tokens = int(bounds[-1])
    return _TILE * (len(bounds) - 1) <= _MOST_FILLING * tokens


def longest_document(bounds: NDArray[np.int32], tokens: int) -> int:
    """Tokens of the longest document between these bounds, rounded up: compiled blocks see few different numbers.

    The next power of two, and no more than the `tokens` of a row; never less than one tile. Told of documents of one
    token, the kernel would take each for the only query of a row.
    """
    longest = int(np.diff(bounds).max())
    return max(_TILE, min(1 << (longest - 1).bit_length(), tokens))


def flash_takes(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether the flash kernel computes and differentiates heads of this size there."""
    # Attention without documents fills up other sizes with zeros; with documents nobody does.
    if device.type != "cuda" or head_size % 8:
        return False
    head = torch.empty(1, 1, 8, head_size, dtype=dtype, device=device, requires_grad=True)
    asked = torch.backends.cuda.SDPAParams(head, head, head, None, 0.0, True, False)
    return torch.backends.cuda.can_use_flash_attention(asked)


def attend_documents(
    query_btne: Tensor, key_btge: Tensor, value_btge: Tensor, bounds: Bounds, window: int = 0
) -> Tensor:
    """Causal attention inside each document, [b, t, n, e]; with a `window` to that many latest tokens only."""
    query, key, value = (part.flatten(0, 1) for part in (query_btne, key_btge, value_btge))
    way = _flash if query.is_cuda else _plain
    return way(query, key, value, bounds, window).view_as(query_btne)


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, window: int) -> Tensor:
    edges, longest = bounds
    found = torch.ops.aten._flash_attention_forward(
        *(query, key, value, edges, edges, longest, longest, 0.0),
        is_causal=True,
        return_debug_mask=False,
        # Tokens to look back and ahead, the query's own not counted.
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )
    mixed: Tensor = found[0]
    return mixed


def _plain(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, window: int) -> Tensor:
    """Document by document, for devices without the kernel."""
    lengths = [end - start for start, end in pairwise(bounds.edges.tolist()) if end > start]
    heads_first = (part.transpose(0, 1)[None].split(lengths, dim=2) for part in (query, key, value))
    mixed = [_plain_document(q, k, v, window) for q, k, v in zip(*heads_first, strict=True)]
    return torch.cat(mixed, dim=2)[0].transpose(0, 1)


def _plain_document(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    tokens, shared = query.shape[2], query.shape[1] != key.shape[1]
    band = None
    if 0 < window < tokens:
        band = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=band, is_causal=band is None, enable_gqa=shared)
