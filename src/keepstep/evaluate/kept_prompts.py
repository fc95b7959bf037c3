"""Keys and values of earlier prompts: a conversation's next prompt begins like its last one, and need not be computed
from its first token on.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.models.attention_context import KeyValueCache
from keepstep.models.transformer import Transformer

_LEAST_TOKENS = 16
"""Fewer shared ones are computed as fast as they are copied."""
_MOST_BYTES = 1 << 30
"""Of keys and values that wait for a next prompt: a few conversations of a large model, many of a small one."""
_MOST_PROMPTS = 64


class KeptPrompts:
    """What the latest conversations had computed, the newest last."""

    def __init__(self, model: Transformer, most_bytes: int = _MOST_BYTES) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._changes = 0
        self._kept: list[tuple[Sequence[int], KeyValueCache]] = []

    def begin(self, prompt: Sequence[int], capacity: int, longest: int) -> KeyValueCache:
        """A cache for this prompt that may hold its first tokens; never all, because the last one's logits are wanted.

        `longest` is how long the text may become: keys that were scaled for another length are of no use.
        """
        changes = sum(parameter._version for parameter in self._model.parameters())
        if changes != self._changes:
            # Whoever holds the model has trained it since.
            self.clear()
            self._changes = changes
        config = self._model.config
        found = [
            (shared_length(prompt[:-1], tokens), cache)
            for tokens, cache in self._kept
            if cache.longest == longest or not config.scales_rope_by_length
        ]
        shared, cache = max(found, key=lambda each: each[0], default=(0, None))
        if cache is None or shared < _LEAST_TOKENS:
            return KeyValueCache(config.layers, capacity, longest=longest)
        return cache.beginning(shared, capacity)

    def keep(self, tokens: Sequence[int], cache: KeyValueCache) -> None:
        """These tokens are in the cache. What is only their beginning need not be kept any more."""
        others = [each for each in self._kept if shared_length(each[0], tokens) < len(each[0])]
        self._kept = [*others, (tuple(tokens[: cache.length]), cache)]
        while len(self._kept) > _MOST_PROMPTS or sum(each.bytes_held() for _, each in self._kept) > self._most_bytes:
            del self._kept[0]

    def clear(self) -> None:
        """Forget all, where memory is short or the weights are others."""
        self._kept = []


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
