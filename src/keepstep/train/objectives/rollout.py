"""Rollouts: the policy answers prompts. Every answer is a function of the weights, its prompt and its own seed.

A checkpoint therefore holds no rollouts: a resumed run writes the same answers again, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from keepstep.evaluate.chat_model import open_decoder
from keepstep.models.transformer import Transformer


@dataclass(frozen=True)
class Rollout:
    """One answer: its tokens with the one that ended it, and the log-probability of each when it was drawn."""

    tokens: list[int]
    log_probabilities: list[float]
    ended: bool
    """False where the limit of tokens cut it off."""


def answer_seed(seed: int, prompt: int, answer: int) -> int:
    """What one answer draws from: the run's seed, the prompt's place in the endless stream (and so its step), and the
    answer's number. No rank has a part in it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:rollout:{prompt}:{answer}".encode()).digest()[:8], "little") >> 1


@torch.no_grad()
def roll_out(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    stop_tokens: Collection[int],
) -> list[Rollout]:
    """Answer all prompts together over one key-value cache, by sampling at temperature 1 without dropout.

    With sharded weights all processes call this together, and decode until the last of them is done.
    """
    training = model.training
    model.eval()
    longest = max(map(len, prompts))
    decode = open_decoder(model, torch.tensor([longest - len(prompt) for prompt in prompts]), longest + max_new_tokens)
    # One generator for each answer: the draws of one must not shift those of another.
    draws_bt = torch.stack(
        [
            torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in seeds
        ]
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    chances: list[list[float]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    next_bt = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    any_running = _agreement(model)
    # Rows grow token by token: compiled blocks would be compiled again for each length.
    with torch.compiler.set_stance("force_eager"):
        for place in range(max_new_tokens):
            chosen_b, chance_b = _draw(decode(next_bt), draws_bt[:, place])
            for row in sorted(running):
                tokens[row].append(int(chosen_b[row]))
                chances[row].append(float(chance_b[row]))
                if tokens[row][-1] in stop_tokens:
                    running.discard(row)
            if not any_running(bool(running)):
                break
            next_bt = chosen_b[:, None]
    model.train(training)
    return [
        Rollout(written, chance, written[-1] in stop_tokens) for written, chance in zip(tokens, chances, strict=True)
    ]


def _draw(logits_bv: Tensor, draws_b: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row, by its place in the cumulative distribution, and its log-probability.

    On the CPU, where sums over the vocabulary have the same order each time.
    """
    log_probabilities_bv = logits_bv.cpu().float().log_softmax(dim=-1)
    cumulative_bv = log_probabilities_bv.double().exp().cumsum(dim=-1)
    # Times the last sum, which rounding keeps from being 1.
    wanted_b1 = (draws_b * cumulative_bv[:, -1])[:, None]
    chosen_b1 = torch.searchsorted(cumulative_bv, wanted_b1, right=True).clamp(max=cumulative_bv.shape[1] - 1)
    return chosen_b1[:, 0], log_probabilities_bv.gather(1, chosen_b1)[:, 0]


def _agreement(model: Transformer) -> Callable[[bool], bool]:
    """Whether any process still writes, where all must call the model equally often."""
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        return lambda running: running

    def any_running(running: bool) -> bool:
        flag = torch.tensor(float(running))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    return any_running
