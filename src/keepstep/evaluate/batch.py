"""Many answers at once: prompts of different lengths decode together over one key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from keepstep.core.errors import UsageError
from keepstep.evaluate.generate import chooser

Decoder = Callable[[Tensor], Tensor]
"""New tokens [b, t] in (the whole prompts first, then one token a row), logits of the last place [b, v] out."""
OpenDecoder = Callable[[Tensor, int], Decoder]
"""Makes a decoder for rows with this much padding on the left [b] and room for this many tokens."""


@torch.no_grad()
def generate_batch(
    open_decoder: OpenDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """New tokens of every prompt, without the token that ended it. Temperature 0 takes the likeliest each time.

    A row's tokens do not depend on which rows it shares the batch with, up to rounding.
    """
    if not prompts or not all(prompts):
        raise UsageError("a prompt has no tokens", "start from the end-of-text token to generate from nothing")
    longest = max(map(len, prompts))
    padding_b = torch.tensor([longest - len(prompt) for prompt in prompts])
    tokens_bt = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    decode = open_decoder(padding_b, longest + max_new_tokens)
    # A chooser a row: what one row draws must not shift what the others draw.
    choosers = [chooser(temperature, top_p, seed + row) for row in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        logits_bv = decode(tokens_bt).cpu()
        chosen = logits_bv.argmax(-1).tolist() if temperature == 0 else [0] * len(prompts)
        for row in sorted(running):
            token = chosen[row] if temperature == 0 else choosers[row](logits_bv[row])
            chosen[row] = token
            if token in ends:
                running.discard(row)
            else:
                answers[row].append(token)
        if not running:
            break
        tokens_bt = torch.tensor(chosen)[:, None]
    return answers


def by_length(prompts: Sequence[Sequence[int]], batch: int) -> Iterator[list[int]]:
    """Places of prompts in groups of like length: little padding."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    return (order[start : start + batch] for start in range(0, len(order), batch))
