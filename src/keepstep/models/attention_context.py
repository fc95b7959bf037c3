"""What a block needs besides its input: who may attend to whom, the rope tables, and keys and values seen so far.

Shape legend: b rows, t query tokens, s key tokens (cached ones first), n heads, f rotary frequencies, g key-value
heads, e head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import UsageError
from keepstep.models.kernels.attention_backward import supports
from keepstep.models.kernels.attention_schedule import BlockMask, make_block_mask
from keepstep.models.ops.fused_attention import ScoreRule
from keepstep.models.ops.varlen_attention import VarlenSpans
from keepstep.models.positions import alibi_slopes, rope_tables


class KeyValueCache:
    """Room for `capacity` tokens a row in every block, so that decoding computes each token once.

    `model(tokens, cache=cache)` fills it and moves on.

    Memory is taken at a block's first tokens, in the shape, precision and device the block uses, so that one cache
    serves plain, sharded and half-precision models alike. All rows hold the same number of tokens: shorter prompts are
    padded on the left, and `padding_b` says by how much, so that nothing attends to padding and positions start at 0.
    """

    def __init__(self, layers: int, capacity: int, padding_b: Tensor | None = None, *, longest: int = 0) -> None:
        self.capacity = capacity
        self.padding_b = padding_b
        self.longest: int | Tensor = longest or capacity
        """How long the text of a row may become, [b, 1] where rows differ: some scalings of rope depend on it."""
        self.length = 0
        """Tokens held: where the next one goes."""
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def update(self, layer: int, key_btge: Tensor, value_btge: Tensor) -> tuple[Tensor, Tensor]:
        """Add one block's new keys and values; returns all of them so far, as views [b, s, g, e]."""
        return self._store(self._keys, layer, key_btge), self._store(self._values, layer, value_btge)

    def _store(self, kept: list[Tensor | None], layer: int, new_btge: Tensor) -> Tensor:
        rows, tokens, heads, size = new_btge.shape
        room = kept[layer]
        if room is None:
            room = kept[layer] = new_btge.new_empty(rows, self.capacity, heads, size)
        end = self.length + tokens
        room[:, self.length : end] = new_btge
        return room[:, :end]

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of this many new tokens, [b or 1, t]."""
        positions_bt = torch.arange(self.length, self.length + tokens, device=device)[None]
        return positions_bt if self.padding_b is None else (positions_bt - self.padding_b[:, None]).clamp(min=0)

    def advance(self, tokens: int) -> None:
        """All blocks have stored this many new tokens."""
        self.length += tokens

    @staticmethod
    def gathered(rows: Sequence[tuple[KeyValueCache, int]], capacity: int) -> KeyValueCache:
        """A cache with copies of these rows (cache, number), each without its padding and aligned on the right."""
        paddings = [0 if cache.padding_b is None else int(cache.padding_b[row]) for cache, row in rows]
        held = [cache.length - padding for (cache, _), padding in zip(rows, paddings, strict=True)]
        longest, first = max(held), rows[0][0]
        made = KeyValueCache(len(first._keys), capacity)
        texts = [int(each if isinstance(each := cache.longest, int) else each[row]) for cache, row in rows]
        made.length, made.longest = longest, texts[0]
        for layer in range(len(first._keys)):
            for kept, source in ((made._keys, "_keys"), (made._values, "_values")):
                tensors = [getattr(cache, source)[layer] for cache, _ in rows]
                # Zeros, because padding is multiplied by zero, and memory that was never written could hold NaN.
                room = kept[layer] = tensors[0].new_zeros(len(rows), capacity, *tensors[0].shape[2:])
                for place, (tensor, (cache, row)) in enumerate(zip(tensors, rows, strict=True)):
                    room[place, longest - held[place] : longest] = tensor[row, paddings[place] : cache.length]
        if min(held) < longest:
            made.padding_b = torch.tensor([longest - tokens for tokens in held], device=room.device)
        if len(set(texts)) > 1:
            made.longest = torch.tensor(texts, device=room.device)[:, None]
        return made

    def beginning(self, tokens: int, capacity: int) -> KeyValueCache:
        """A cache with a copy of the first tokens of rows without padding."""
        made = KeyValueCache(len(self._keys), capacity)
        made.length, made.longest = tokens, self.longest
        for copies, kept in ((made._keys, self._keys), (made._values, self._values)):
            for layer, room in enumerate(kept):
                assert room is not None
                copy = copies[layer] = room.new_empty(len(room), capacity, *room.shape[2:])
                copy[:, :tokens] = room[:, :tokens]
        return made

    def bytes_held(self) -> int:
        """Memory of all keys and values."""
        return sum(room.nbytes for room in (*self._keys, *self._values) if room is not None)

    def check_room(self, tokens: int) -> None:
        """Raise where this many more tokens do not fit."""
        if self.length + tokens > self.capacity:
            raise UsageError(
                f"the key-value cache holds {self.length} of {self.capacity} tokens and {tokens} more do not fit",
                "make the cache with a larger capacity",
            )


class SlotCache(KeyValueCache):
    """Keys and values in slots: every row has its own number of tokens, so that rows can come and go.

    All shapes are fixed and lengths are on the device: a decoding step can be a CUDA graph. A new row is filled with
    its prompt first (`fill`), then all rows decode one token at a time (`decode`). What follows the tokens that a row
    holds can be added in one forward (`extend`).
    """

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers, capacity)
        self.lengths_b = torch.zeros(rows, dtype=torch.int64, device=device)
        """Tokens that each row holds. Whoever decodes adds to it."""
        self.window = 0
        """Keys that a step attends to, at least as many as any running row holds with its new one; 0 while filling."""
        self._extended_k: Tensor | None = None
        self._last = 0
        self._first_b = torch.arange(rows, device=device) * capacity
        self._longest_b1 = torch.full((rows, 1), capacity, device=device)
        self._slots_k = self._source_k = self._first_b

    def fill(self, slots_k: Tensor, source_k: Tensor, longest_r: Tensor) -> None:
        """The next forward computes prompts from their first token; slot k holds those of row `source_k[k]` then.

        The texts of its rows become `longest_r` tokens long at most.
        """
        self.window, self._slots_k, self._source_k = 0, slots_k, source_k
        self.longest = longest_r[:, None]
        self._longest_b1[slots_k] = self.longest[source_k]

    def decode(self, window: int) -> None:
        """The next forwards compute one token for each slot."""
        self.window, self._extended_k, self.longest = window, None, self._longest_b1

    def extend(self, slots_k: Tensor, longest: int, window: int) -> None:
        """The next forward computes tokens that follow what these slots hold, `longest` in all at most. All padding
        behind them goes to the place after that, within the window: what attends to nothing would become NaN."""
        self.window, self._extended_k, self._last = window, slots_k, longest
        self.longest = self._longest_b1[slots_k]

    def keep(self, rows_k: Tensor) -> None:
        """Drop all rows but these."""
        self.lengths_b, self._first_b = self.lengths_b[rows_k], self._first_b[: len(rows_k)]
        self._longest_b1 = self._longest_b1[rows_k]
        for kept in (self._keys, self._values):
            kept[:] = [None if room is None else room[rows_k] for room in kept]

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Prompts start at 0, new tokens at the length of their row."""
        if not self.window:
            return super().positions(tokens, device)
        if self._extended_k is None:
            return self.lengths_b[:, None]
        return (self.lengths_b[self._extended_k, None] + torch.arange(tokens, device=device)).clamp(max=self._last)

    def advance(self, tokens: int) -> None:
        """Nothing: lengths are the caller's, because not all rows are running."""

    def _store(self, kept: list[Tensor | None], layer: int, new_btge: Tensor) -> Tensor:
        rows, tokens = len(self.lengths_b), new_btge.shape[1]
        room = kept[layer]
        if room is None:
            # Zeros, because what is masked is multiplied by zero, and memory that was never written could hold NaN.
            room = kept[layer] = new_btge.new_zeros(rows, self.capacity, *new_btge.shape[2:])
        if self._extended_k is not None and self.window:
            places_kt = self._first_b[self._extended_k, None] + self.positions(tokens, room.device)
            room.flatten(0, 1)[places_kt] = new_btge
            return room[self._extended_k, : self.window]
        if self.window:
            room.flatten(0, 1).index_copy_(0, self._first_b + self.lengths_b, new_btge[:, 0])
            return room[:, : self.window]
        room[:, :tokens].index_copy_(0, self._slots_k, new_btge[self._source_k])
        return new_btge

    def mask(self, config: ModelConfig, positions_bt: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of new tokens at these positions, [b, 1 or n, t, s]."""
        distance_bts = positions_bt[..., None] - torch.arange(self.window, device=positions_bt.device)
        hidden_bts = distance_bts < 0
        if config.sliding_window:
            hidden_bts = hidden_bts | (distance_bts >= config.sliding_window)
        bias = torch.zeros_like(distance_bts, dtype=torch.float32)[:, None]
        if config.positions == "alibi":
            slopes_n = alibi_slopes(config.heads, config.alibi_bias_max, distance_bts.device)
            bias = -slopes_n[:, None, None] * distance_bts[:, None]
        return bias.masked_fill(hidden_bts[:, None], float("-inf")).to(dtype)


class Context:
    """Shared by all blocks of one forward.

    A plain class on purpose: FSDP casts every tensor it finds in a block's arguments, dataclasses and tuples included,
    to the compute precision, and rotary angles in bfloat16 lose whole positions.
    """

    __slots__ = ("block_mask", "cache", "causal", "mask", "rotary", "scale", "sliding", "softcap", "spans", "window")

    def __init__(
        self,
        mask: Tensor | None,
        causal: bool,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None,
        spans: VarlenSpans | None = None,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        self.mask, self.causal, self.rotary, self.cache = mask, causal, rotary, cache
        self.spans = spans
        """Where packed documents start and end, in place of a mask."""
        self.window = window
        """With spans: how many latest tokens a query attends to; 0 for all."""
        self.scale = scale
        """What scores are multiplied by; None is 1 / √(head size)."""
        self.softcap = softcap
        """Scores stay within ± this; 0 for no bound."""
        self.block_mask: BlockMask | None = None
        """With spans that our own attention operator computes: what its kernels must know of them."""
        self.sliding: Context | None = None
        """The context of sliding layers, where layers differ."""

    def fused_rule(self) -> ScoreRule | None:
        """What our own attention operator must know; None where it does not compute these scores."""
        if self.softcap or not self.causal or self.mask is not None or self.cache is not None:
            return None
        if self.spans is None:
            return ScoreRule(self.scale)
        if self.block_mask is None:
            return None
        return ScoreRule(self.scale, self.window, self.spans.max_seqlen, self.spans.cu_seqlens, *self.block_mask)


def each_kind(config: ModelConfig, make: Callable[[ModelConfig], Context]) -> Context:
    """The context that `make` makes, and where layers differ the one of sliding layers in it."""
    if not config.layer_types:
        return make(config)
    context = make(replace(config, sliding_window=0))
    if config.rotary_local_base:
        config = replace(config, rotary_base=config.rotary_local_base, rotary_scaling=None)
    context.sliding = make(config)
    return context


def make_context(
    config: ModelConfig,
    x_btd: Tensor,
    positions_bt: Tensor,
    documents_bt: Tensor | None,
    cache: KeyValueCache | None,
    spans: VarlenSpans | None = None,
) -> Context:
    """Mask and rope tables for these tokens. `x_btd` gives the device and the mask's precision.

    Their number comes from the positions: under sequence parallelism `x_btd` holds a part of the row only. With
    `spans` of documents no mask is made.
    """
    return each_kind(config, lambda kind: _one_context(kind, x_btd, positions_bt, documents_bt, cache, spans))


def _one_context(
    config: ModelConfig,
    x_btd: Tensor,
    positions_bt: Tensor,
    documents_bt: Tensor | None,
    cache: KeyValueCache | None,
    spans: VarlenSpans | None,
) -> Context:
    tokens = positions_bt.shape[1]
    rotary = rope_tables(config, positions_bt, cache.longest if cache else 0) if config.positions == "rotary" else None
    scale, softcap = config.score_scale, config.attn_logit_softcapping
    if spans is not None and spans.whole_rows and not config.sliding_window:
        spans = None
    if spans is not None:
        # Variable-length attention supports none of these: they would be ignored silently.
        refused = {"ALiBi positions": config.positions == "alibi", "a key-value cache": cache is not None}
        refused |= {"soft-capped scores": softcap > 0, "attention sinks": config.attention_sinks}
        for other in [name for name, given in refused.items() if given]:
            raise UsageError(f"spans of packed documents and {other} cannot be combined", "give documents_bt alone")
        context = Context(None, True, rotary, None, spans, config.sliding_window, scale)
        if spans.fused and supports(tokens, config.head_size, x_btd.dtype):
            shape = (len(x_btd), tokens, config.sliding_window, config.key_value_heads)
            context.block_mask = make_block_mask(spans.cu_seqlens, *shape)
        return context
    if isinstance(cache, SlotCache) and cache.window:
        return Context(
            cache.mask(config, positions_bt, x_btd.dtype), False, rotary, cache, scale=scale, softcap=softcap
        )
    past, padding_b = (cache.length, cache.padding_b) if cache else (0, None)
    mask = _attention_mask(config, x_btd, tokens, documents_bt, past, padding_b)
    one_query = cache is not None and cache.length > 0 and tokens == 1
    return Context(mask, mask is None and not one_query, rotary, cache, scale=scale, softcap=softcap)


def _attention_mask(
    config: ModelConfig,
    x_btd: Tensor,
    tokens: int,
    documents_bt: Tensor | None,
    past: int,
    padding_b: Tensor | None,
) -> Tensor | None:
    """None where plain causal attention says it all (the fast kernels need no mask then).

    Otherwise boolean [b or 1, 1, t, s], True where attention is allowed, or with ALiBi an additive bias
    [b or 1, n, t, s] in the precision of `x_btd`. Distances are counted in tokens of the row: inside a document they
    equal distances between positions, and across documents nothing attends.
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
