"""How tokens are chosen from logits on the device, many rows at a time.

Shape legend: b rows, v vocabulary, n blocks of the vocabulary, k tokens of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value

_BLOCK = 256
"""Tokens of the vocabulary whose probabilities are added up before a place among them is searched."""


@dataclass(frozen=True)
class Sampler:
    """Temperature 0 takes the likeliest token each time; otherwise tokens are drawn, from the likeliest that together
    reach `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            rule = invalid_value("temperature", self.temperature, "must be 0 (greedy) or more")
            raise UsageError(rule, "0.7 is a usual value")
        if not 0 < self.top_p <= 1:
            raise UsageError(
                invalid_value("top_p", self.top_p, "must be above 0 and at most 1"), "1 considers every token"
            )

    @property
    def draws(self) -> bool:
        """Whether a choice depends on a random number."""
        return self.temperature > 0

    def choose(self, logits_bv: Tensor, draws_b: Tensor) -> tuple[Tensor, Tensor | None]:
        """A token for each row by its number in [0, 1), and its log-probability; None for the likeliest one."""
        if not self.draws:
            return logits_bv.argmax(dim=-1), None
        logits_bv = logits_bv.float()
        if self.temperature != 1:
            # Subtract the largest logit first: divided by a small temperature, logits would overflow.
            logits_bv = logits_bv.double()
            logits_bv = (logits_bv - logits_bv.amax(dim=-1, keepdim=True)) / self.temperature
        log_probabilities_bv = logits_bv.log_softmax(dim=-1)
        probabilities_bv = log_probabilities_bv.double().exp()
        if self.top_p < 1:
            ordered_bv, tokens_bv = probabilities_bv.sort(dim=-1, descending=True, stable=True)
            # Keep the smallest set that reaches top_p: a token stays while those before it have not reached it.
            dropped_bv = ordered_bv.cumsum(dim=-1) - ordered_bv >= self.top_p
            probabilities_bv = probabilities_bv.scatter(1, tokens_bv, ordered_bv.masked_fill(dropped_bv, 0.0))
        chosen_b = place_of_draws(probabilities_bv, draws_b)
        # A NaN's place may be behind the vocabulary's end, in its padding.
        chosen_b = chosen_b.clamp(max=logits_bv.shape[1] - 1)
        return chosen_b, log_probabilities_bv.gather(1, chosen_b[:, None])[:, 0].float()


def place_of_draws(probabilities_bv: Tensor, draws_b: Tensor) -> Tensor:
    """Where the cumulative distribution of each row passes its number.

    First a block of the vocabulary, then a token in it: sums of a few hundred numbers along rows have the same order
    each time, which a cumulative sum over the whole vocabulary has not on a GPU.
    """
    vocab = probabilities_bv.shape[1]
    blocks_bnk = F.pad(probabilities_bv, (0, -vocab % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums_bn = blocks_bnk.sum(dim=-1)
    block_b, left_b = _place(sums_bn, draws_b * sums_bn.sum(dim=1))
    index = block_b[:, None, None].expand(-1, 1, _BLOCK)
    inside_b, _ = _place(blocks_bnk.gather(1, index)[:, 0], left_b)
    return block_b * _BLOCK + inside_b


def _place(parts_bn: Tensor, wanted_b: Tensor) -> tuple[Tensor, Tensor]:
    """The part of each row in which the cumulative sum passes `wanted_b`, and how far into it; never an empty part."""
    cumulative_bn = parts_bn.cumsum(dim=-1)
    # Rounding may put it at the very end, behind the last part that holds anything.
    wanted_b = torch.minimum(wanted_b, torch.nextafter(cumulative_bn[:, -1], torch.zeros_like(wanted_b)))
    part_b1 = torch.searchsorted(cumulative_bn, wanted_b[:, None], right=True)
    # Logits that are not numbers have no place. A GPU would end the process at an index that does not exist.
    part_b1 = part_b1.clamp(max=parts_bn.shape[1] - 1)
    before_b1 = cumulative_bn.gather(1, part_b1) - parts_bn.gather(1, part_b1)
    return part_b1[:, 0], (wanted_b[:, None] - before_b1)[:, 0]
