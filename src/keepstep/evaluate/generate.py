"""Generate text with a model: greedy or seeded sampling over a forward callable. Knows nothing of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value
from keepstep.evaluate.draw import Sampler

Forward = Callable[[Tensor], Tensor]
"""All tokens so far, int64 [1, T] on the CPU, in; logits of the last position, [vocab] or [1, vocab], out.

Each call has the tokens of the previous call and one more: with a key-value cache only that one is computed."""


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


def batches_by_length(prompts: Sequence[Sequence[int]], batch: int) -> Iterator[list[int]]:
    """Numbers of prompts in batches of similar length, so that there is little padding."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    return (order[start : start + batch] for start in range(0, len(order), batch))


def chooser(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Callable[[Tensor], int]:
    """A function from logits to a token. The same seed gives the same tokens on every device."""
    sampler = Sampler(temperature, top_p)
    if not 0 <= seed < 1 << 63:
        raise UsageError(invalid_value("seed", seed, "must be a whole number from 0 to 2^63 - 1"), "0 is the default")
    # Drawn on the CPU: a GPU's generator gives other numbers for the same seed.
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        if not sampler.draws:
            return int(logits.argmax())
        draw = torch.rand(1, generator=generator, dtype=torch.float64)
        return int(sampler.choose(logits.detach().cpu()[None], draw)[0])

    return choose
