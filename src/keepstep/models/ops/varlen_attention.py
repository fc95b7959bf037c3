"""Attention inside packed documents by the flash kernel's variable-length form: no pair across documents is computed.

A mask says the same, but takes rows × tokens² numbers, and every masked pair is computed first.

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
"""Tokens the kernel processes together: shorter documents cost as much."""

_MOST_PADDING = 8
"""Padding of the backward pass, in multiples of the tokens. A mask is smaller for documents below 16 tokens."""


class VarlenSpans(NamedTuple):
    """Where documents start and end when all rows are laid end to end."""

    cu_seqlens: Tensor
    """The result of `cu_seqlens_of`, on the device of the queries."""
    max_seqlen: int
    """No document has more tokens."""
    fused: bool = False
    """Whether our own backward kernels compute blocks that they fit (`models/ops/fused_attention.py`)."""
    whole_rows: bool = False
    """Whether each row is one document, which only a sliding window needs to know."""


def cu_seqlens_of(documents_bt: NDArray[Any]) -> NDArray[np.int32]:
    """Where documents start in the rows laid end to end, then the end of all.

    The end is repeated until there are a power of two and one entries: compiled blocks see few lengths, and a document
    without tokens costs next to nothing.
    """
    starts_bt = np.ones(documents_bt.shape, dtype=bool)
    starts_bt[:, 1:] = documents_bt[:, 1:] != documents_bt[:, :-1]
    starts = np.flatnonzero(starts_bt)
    room = 1 << (len(starts) - 1).bit_length()
    cu_seqlens = np.full(room + 1, documents_bt.size, dtype=np.int32)
    cu_seqlens[: len(starts)] = starts
    return cu_seqlens


def fits_varlen_kernel(cu_seqlens: NDArray[np.int32]) -> bool:
    """Whether the kernel has room for so many documents: its backward pass pads each one by a tile, in fp32."""
    tokens = int(cu_seqlens[-1])
    return _TILE * (len(cu_seqlens) - 1) <= _MOST_PADDING * tokens


def max_seqlen_of(cu_seqlens: NDArray[np.int32], tokens: int) -> int:
    """Tokens of the longest document, rounded up: compiled blocks see few different numbers.

    The next power of two, at most the `tokens` of a row, and never less than one tile: with a maximum of one token the
    kernel would treat each document as a single decoding query.
    """
    longest = int(np.diff(cu_seqlens).max())
    return max(_TILE, min(1 << (longest - 1).bit_length(), tokens))


def flash_supports(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether the flash kernel computes and differentiates heads of this size there."""
    # Torch pads other head sizes with zeros for plain attention, but not for the variable-length form.
    if device.type != "cuda" or head_size % 8:
        return False
    head = torch.empty(1, 1, 8, head_size, dtype=dtype, device=device, requires_grad=True)
    asked = torch.backends.cuda.SDPAParams(head, head, head, None, 0.0, True, False)
    return torch.backends.cuda.can_use_flash_attention(asked)


def varlen_attention(
    query_btne: Tensor,
    key_btge: Tensor,
    value_btge: Tensor,
    spans: VarlenSpans,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention inside each document, [b, t, n, e]; with a `window` to that many latest tokens only.

    Scores are multiplied by `scale`; None is 1 / √e.
    """
    query, key, value = (part.flatten(0, 1) for part in (query_btne, key_btge, value_btge))
    if query.is_cuda:
        return flash_varlen(query, key, value, spans, window, scale)[0].view_as(query_btne)
    return _plain(query, key, value, spans, window, scale).view_as(query_btne)


def flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, spans: VarlenSpans, window: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output [b·t, n, e] over heads [b·t, .., e], and the fp32 log-sum-exp of each softmax [n, b·t]."""
    cu_seqlens, longest = spans.cu_seqlens, spans.max_seqlen
    attn_out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, cu_seqlens, cu_seqlens, longest, longest, 0.0),
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        # Tokens to look back and ahead, not counting the query's own.
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )
    return attn_out, lse


def _plain(query: Tensor, key: Tensor, value: Tensor, spans: VarlenSpans, window: int, scale: float | None) -> Tensor:
    """Document by document, for devices without the kernel."""
    lengths = [end - start for start, end in pairwise(spans.cu_seqlens.tolist()) if end > start]
    heads_first = (part.transpose(0, 1)[None].split(lengths, dim=2) for part in (query, key, value))
    parts = [_plain_document(q, k, v, window, scale) for q, k, v in zip(*heads_first, strict=True)]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _plain_document(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None) -> Tensor:
    tokens, shared = query.shape[2], query.shape[1] != key.shape[1]
    band = None
    if 0 < window < tokens:
        band = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=shared
    )
