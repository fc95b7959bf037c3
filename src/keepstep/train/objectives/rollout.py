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
from torch.nn import functional as F

from keepstep.evaluate.chat_model import open_decoder
from keepstep.models.transformer import Transformer

_BLOCK = 256
"""Tokens of the vocabulary whose probabilities the device adds up."""


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

    The device only adds up blocks of the vocabulary, in an order that does not vary. The cumulative sums of a few
    hundred numbers, which have no such order on a GPU, are the host's.
    """
    log_probabilities_bv = logits_bv.float().log_softmax(dim=-1)
    vocab = log_probabilities_bv.shape[1]
    blocks_bnk = F.pad(log_probabilities_bv.double().exp(), (0, -vocab % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums_bn = blocks_bnk.sum(dim=-1).cpu()
    block_b, left_b = _place(sums_bn, draws_b * sums_bn.sum(dim=1))
    rows_b = torch.arange(len(draws_b), device=blocks_bnk.device)
    inside_b, _ = _place(blocks_bnk[rows_b, block_b.to(rows_b.device)].cpu(), left_b)
    chosen_b = block_b * _BLOCK + inside_b
    return chosen_b, log_probabilities_bv[rows_b, chosen_b.to(rows_b.device)].cpu()


def _place(parts_bn: Tensor, wanted_b: Tensor) -> tuple[Tensor, Tensor]:
    """The part of each row in which the cumulative sum passes `wanted_b`, and how far into it; never an empty part."""
    cumulative_bn = parts_bn.cumsum(dim=-1)
    # Rounding may put it at the very end, behind the last part that holds anything.
    wanted_b = torch.minimum(wanted_b, torch.nextafter(cumulative_bn[:, -1], torch.zeros((), dtype=torch.float64)))
    part_b1 = torch.searchsorted(cumulative_bn, wanted_b[:, None], right=True)
    before_b1 = cumulative_bn.gather(1, part_b1) - parts_bn.gather(1, part_b1)
    return part_b1[:, 0], (wanted_b[:, None] - before_b1)[:, 0]


def _agreement(model: Transformer) -> Callable[[bool], bool]:
    """Whether any process still writes, where all must call the model equally often."""
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        return lambda running: running

    def any_running(running: bool) -> bool:
        flag = torch.tensor(float(running))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    return any_running
