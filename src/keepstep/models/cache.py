"""Keys and values of the tokens seen so far, so that decoding computes each token once.

Shape legend: b rows, t new tokens, s all tokens so far, g key-value heads, e head size.
"""

from __future__ import annotations

from torch import Tensor

from keepstep.core.errors import UsageError


class KeyValueCache:
    """Room for `capacity` tokens a row in every block; `model(tokens, cache=cache)` fills it and moves on.

    Memory is taken at a block's first tokens, in the shape, precision and device the block uses, so that one cache
    serves plain, sharded and half-precision models alike. All rows hold the same number of tokens: shorter prompts are
    padded on the left, and `padding_b` says by how much, so that nothing attends to padding and positions start at 0.
    """

    def __init__(self, layers: int, capacity: int, padding_b: Tensor | None = None) -> None:
        self.capacity = capacity
        self.padding_b = padding_b
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

    def advance(self, tokens: int) -> None:
        """All blocks have stored this many new tokens."""
        self.length += tokens

    def reset(self) -> None:
        """Forget every token and keep the memory."""
        self.length = 0

    def check_room(self, tokens: int) -> None:
        """Raise where this many more tokens do not fit."""
        if self.length + tokens > self.capacity:
            raise UsageError(
                f"the key-value cache holds {self.length} of {self.capacity} tokens and {tokens} more do not fit",
                "make the cache with a larger capacity",
            )
