"""Text from a model: greedy choice or seeded sampling over a forward callable. Knows nothing of parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from keepstep.core.errors import UsageError

Forward = Callable[[Tensor], Tensor]
"""All tokens so far, int64 [1, T] on the CPU, in; logits of the last position, [vocab] or [1, vocab], out.

Each call's tokens are the former call's with one more at the end, so a forward with a key-value cache needs to look
at the new ones only."""


def generate(
    forward: Forward,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: int | None = None,
) -> list[int]:
    """The new tokens, without the prompt and without `eos`. Temperature 0 takes the likeliest token each time."""
    choose = chooser(temperature, top_p, seed)
    return list(stream(forward, prompt, choose, max_new_tokens=max_new_tokens, eos=eos))


@torch.no_grad()
def stream(
    forward: Forward,
    prompt: Sequence[int],
    choose: Callable[[Tensor], int],
    *,
    max_new_tokens: int = 128,
    eos: int | None = None,
) -> Iterator[int]:
    """New tokens one at a time, as they are chosen; ends before `eos`."""
    if not prompt:
        raise UsageError("the prompt has no tokens", "start from the end-of-text token to generate from nothing")
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(max_new_tokens):
        token = choose(forward(tokens).reshape(-1))
        if token == eos:
            return
        yield token
        tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


def chooser(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Callable[[Tensor], int]:
    """A function from logits to a token. The same seed gives the same tokens on every device."""
    if not 0 <= temperature < math.inf:
        raise UsageError(f"temperature is {temperature:g}, but it must be 0 (greedy) or more", "0.7 is a usual value")
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p is {top_p:g}, but it must be above 0 and at most 1", "1 considers every token")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed}, but it must be a whole number from 0 to 2^63 - 1", "0 is the default")
    # Drawn on the CPU: a GPU's generator gives other numbers for the same seed.
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        if temperature == 0:
            return int(logits.argmax())
        # The largest becomes 0 first: divided by a small temperature, numbers grow beyond all bounds.
        raised = logits.detach().double().cpu()
        probabilities = torch.softmax((raised - raised.max()) / temperature, dim=-1)
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        # Keep the smallest set that reaches top_p: a token stays while those before it have not reached it.
        ordered[ordered.cumsum(0) - ordered >= top_p] = 0
        drawn = torch.multinomial(ordered, 1, generator=generator)
        return int(tokens[drawn])

    return choose
