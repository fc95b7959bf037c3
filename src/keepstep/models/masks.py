"""What a block needs beside its input, made once a forward: who may attend to whom, and the rotary tables.

Shape legend: b rows, t query tokens, s key tokens (cached ones first), n heads, f rotary frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import UsageError
from keepstep.models.cache import KeyValueCache
from keepstep.models.documents import Bounds
from keepstep.models.positions import alibi_slopes, rotary_tables


class Context:
    """Shared by all blocks of one forward.

    A plain class on purpose: FSDP casts every tensor it finds in a block's arguments, dataclasses and tuples included,
    to the compute precision, and rotary angles in bfloat16 lose whole positions.
    """

    __slots__ = ("bounds", "cache", "causal", "mask", "rotary", "window")

    def __init__(
        self,
        mask: Tensor | None,
        causal: bool,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None,
    ) -> None:
        self.mask = mask
        self.causal = causal
        self.rotary = rotary
        self.cache = cache
        self.bounds: Bounds | None = None
        """Where documents lie in the rows laid end to end, in place of a mask."""
        self.window = 0
        """With bounds: how many latest tokens are attended to; 0 for all."""

    def is_plain(self) -> bool:
        """Whether every token attends to all before it in its row, and nothing is remembered."""
        return self.causal and self.mask is None and self.bounds is None and self.cache is None


def make_context(
    config: ModelConfig,
    x_btd: Tensor,
    positions_bt: Tensor,
    documents_bt: Tensor | None,
    cache: KeyValueCache | None,
    bounds: Bounds | None = None,
) -> Context:
    """Mask and rotary tables for these tokens. `x_btd` gives the device and the mask's precision.

    Their number comes from the positions: under sequence parallelism `x_btd` holds a part of the row only. With
    `bounds` of documents no mask is made.
    """
    tokens = positions_bt.shape[1]
    rotary = rotary_tables(config, positions_bt) if config.positions == "rotary" else None
    if bounds is not None:
        return _bounded_context(config, rotary, cache, bounds)
    past, padding_b = (cache.length, cache.padding_b) if cache else (0, None)
    mask = attention_mask(config, x_btd, tokens, documents_bt, past, padding_b)
    one_query = cache is not None and cache.length > 0 and tokens == 1
    return Context(mask, mask is None and not one_query, rotary, cache)


def _bounded_context(
    config: ModelConfig, rotary: tuple[Tensor, Tensor] | None, cache: KeyValueCache | None, bounds: Bounds
) -> Context:
    # Attention by bounds knows neither: both would be left out without a word.
    if config.positions == "alibi" or cache is not None:
        other = "ALiBi positions" if config.positions == "alibi" else "a key-value cache"
        raise UsageError(f"bounds of documents and {other} do not go together", "give documents_bt alone")
    context = Context(None, True, rotary, None)
    context.bounds, context.window = bounds, config.sliding_window
    return context


def attention_mask(
    config: ModelConfig,
    x_btd: Tensor,
    tokens: int,
    documents_bt: Tensor | None,
    past: int,
    padding_b: Tensor | None = None,
) -> Tensor | None:
    """None where plain causal attention says it all (the fast kernels need no mask then).

    Otherwise boolean [b or 1, 1, t, s], True where attention is allowed, or with ALiBi an additive bias
    [b or 1, n, t, s] in the precision of `x_btd`. Distances are counted in tokens of the row: inside a document they
    equal distances between positions, and across documents nothing is attended to.
    """
    windowed = 0 < config.sliding_window < past + tokens
    alibi = config.positions == "alibi"
    catching_up = past > 0 and tokens > 1
    if documents_bt is None and padding_b is None and not (windowed or alibi or catching_up):
        return None
    query_t = torch.arange(past, past + tokens, device=x_btd.device)
    key_s = torch.arange(past + tokens, device=x_btd.device)
    distance_ts = query_t[:, None] - key_s
    allowed = (distance_ts >= 0)[None, None]
    if windowed:
        allowed = allowed & (distance_ts < config.sliding_window)
    if documents_bt is not None:
        allowed = allowed & (documents_bt[:, None, :, None] == documents_bt[:, None, None, :])
    if padding_b is not None:
        # Padding attends to itself: a query that may attend to nothing would turn into NaN and spread.
        allowed = (allowed & (key_s >= padding_b[:, None, None, None])) | (distance_ts == 0)
    if not alibi:
        return allowed
    slopes_n = alibi_slopes(config.heads, config.alibi_bias_max, x_btd.device)
    bias_nts = -slopes_n[:, None, None] * distance_ts
    return bias_nts.masked_fill(~allowed, float("-inf")).to(x_btd.dtype)
