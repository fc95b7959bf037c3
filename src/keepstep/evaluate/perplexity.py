"""Loss and perplexity over held-out batches, with any function that computes the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from keepstep.core.errors import DataError

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class PerplexityResult:
    """Mean over tokens and not over batches: batches with more padding count less."""

    loss: float
    """Mean cross-entropy of a token, in nats."""
    perplexity: float
    """exp(loss); infinite if that does not fit a float."""
    tokens: int
    """Tokens that had a target."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of an objective other than next-token prediction, whose loss has no perplexity."""


def perplexity(forward_loss: Callable[[BatchT], tuple[float, int]], batches: Iterable[BatchT]) -> PerplexityResult:
    """Run `forward_loss` on each batch; it gives the SUM of token losses and the number of tokens that had one.

    On several processes `forward_loss` returns the sums over all of them, so every rank gets the same result.
    """
    sums: list[float] = []
    tokens = 0
    for batch in batches:
        batch_sum, batch_tokens = forward_loss(batch)
        sums.append(batch_sum)
        tokens += batch_tokens
    if tokens == 0:
        raise DataError("no token to evaluate: the validation batches hold none with a target", "check data.valid_path")
    # fsum does not depend on the order or size of the batches, so equal data gives an equal loss.
    loss = math.fsum(sums) / tokens
    return PerplexityResult(loss, exponential(loss), tokens)


def exponential(loss: float) -> float:
    """exp(loss), infinite instead of an overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
