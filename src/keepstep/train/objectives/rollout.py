"""Rollouts: the policy answers prompts. Every answer is a function of the weights, its prompt and its own seed.

A checkpoint therefore holds no rollouts: a resumed run writes the same answers again, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from keepstep.evaluate.continuous_batching import Generated, Request, generate_batch
from keepstep.evaluate.draw import Sampler
from keepstep.models.transformer import Transformer


def answer_seed(seed: int, prompt: int, answer: int) -> int:
    """What one answer draws from: the run's seed, the prompt's place in the endless stream (and so its step), and the
    answer's number. No rank has a part in it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:rollout:{prompt}:{answer}".encode()).digest()[:8], "little") >> 1


def roll_out(
    model: Transformer, requests: Sequence[Request], stop_tokens: Collection[int], rows: int
) -> list[Generated]:
    """Answer all prompts, at most `rows` at a time, by sampling at temperature 1 without dropout.

    With sharded weights all processes call this together.
    """
    training = model.training
    model.eval()
    sampler, agree = Sampler(temperature=1.0), _agreement(model)
    answers = generate_batch(model, requests, rows=rows, sampler=sampler, stop_tokens=stop_tokens, agree=agree)
    model.train(training)
    return answers


def _agreement(model: Transformer) -> Callable[[bool], bool]:
    """Whether any process still writes, where all must call the model equally often."""
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        return bool

    def any_running(running: bool) -> bool:
        flag = torch.tensor(float(running))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    return any_running
