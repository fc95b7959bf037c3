"""Generate text with a model: greedy or seeded sampling over a forward callable. Knows nothing of parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value

Forward = Callable[[Tensor], Tensor]
"""All tokens so far, int64 [1, T] on the CPU, in; logits of the last position, [vocab] or [1, vocab], out.

Each call has the tokens of the previous call and one more: with a key-value cache only that one is computed."""
Decoder = Callable[[Tensor], Tensor]
"""New tokens [b, t] in (first the prompts, then one token for each row), logits of the last position [b, v] out."""
OpenDecoder = Callable[[Tensor, int], Decoder]
"""Opens a decoder for rows with this much padding on the left [b] and room for this many tokens."""


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


@torch.no_grad()
def generate_batch(
    open_decoder: OpenDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
) -> list[list[int]]:
    """New tokens of every prompt, without the stop token. Temperature 0 takes the likeliest token each time.

    Prompts of different lengths are decoded together over one key-value cache. A row's tokens do not depend on the
    other rows of the batch, up to rounding.
    """
    if not prompts or not all(prompts):
        raise UsageError("a prompt has no tokens", "start from the end-of-text token to generate from nothing")
    longest = max(map(len, prompts))
    padding_b = torch.tensor([longest - len(prompt) for prompt in prompts])
    tokens_bt = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    decode = open_decoder(padding_b, longest + max_new_tokens)
    # One chooser for each row: the draws of one row must not shift those of another.
    choosers = [chooser(temperature, top_p, seed + row) for row in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        logits_bv = decode(tokens_bt).cpu()
        chosen = logits_bv.argmax(-1).tolist() if temperature == 0 else [0] * len(prompts)
        for row in sorted(running):
            token = chosen[row] if temperature == 0 else choosers[row](logits_bv[row])
            chosen[row] = token
            if token in stop_tokens:
                running.discard(row)
            else:
                answers[row].append(token)
        if not running:
            break
        tokens_bt = torch.tensor(chosen)[:, None]
    return answers


def batches_by_length(prompts: Sequence[Sequence[int]], batch: int) -> Iterator[list[int]]:
    """Numbers of prompts in batches of similar length, so that there is little padding."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    return (order[start : start + batch] for start in range(0, len(order), batch))


def chooser(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Callable[[Tensor], int]:
    """A function from logits to a token. The same seed gives the same tokens on every device."""
    if not 0 <= temperature < math.inf:
        raise UsageError(
            invalid_value("temperature", temperature, "must be 0 (greedy) or more"), "0.7 is a usual value"
        )
    if not 0 < top_p <= 1:
        raise UsageError(invalid_value("top_p", top_p, "must be above 0 and at most 1"), "1 considers every token")
    if not 0 <= seed < 1 << 63:
        raise UsageError(invalid_value("seed", seed, "must be a whole number from 0 to 2^63 - 1"), "0 is the default")
    # Drawn on the CPU: a GPU's generator gives other numbers for the same seed.
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        if temperature == 0:
            return int(logits.argmax())
        # Subtract the largest logit first: divided by a small temperature, logits would overflow.
        raised = logits.detach().double().cpu()
        probabilities = torch.softmax((raised - raised.max()) / temperature, dim=-1)
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        # Keep the smallest set that reaches top_p: a token stays while those before it have not reached it.
        ordered[ordered.cumsum(0) - ordered >= top_p] = 0
        drawn = torch.multinomial(ordered, 1, generator=generator)
        return int(tokens[drawn])

    return choose
