"""Rollouts: the policy answers prompts. Every answer is a function of the weights, its prompt and its own seed.

A checkpoint therefore holds no rollouts: a resumed run writes the same answers again, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Batch
from keepstep.evaluate.continuous_batching import Generated, Request, generate_batch
from keepstep.evaluate.draw import Sampler
from keepstep.models.transformer import Transformer

_SAMPLER = Sampler(temperature=1.0)
_MOST_ROUNDS = 16


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
    agree = _agreement(model)
    answers = generate_batch(model, requests, rows=rows, sampler=_SAMPLER, stop_tokens=stop_tokens, agree=agree)
    model.train(training)
    return answers


@torch.no_grad()
def confirm(
    model: Transformer, requests: Sequence[Request], answers: Sequence[Generated], stop_tokens: Collection[int]
) -> list[Generated]:
    """The answers that whole forward passes would have drawn, which round in another order than decoding does.

    Every token is drawn again, with its own number, from a forward pass in the shape of training. After the first that
    differs an answer is continued from there. That is rare, and a few rounds leave no difference.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    answers = list(answers)
    for _ in range(_MOST_ROUNDS):
        inputs_bt = torch.from_numpy(answer_batch([request.prompt for request in requests], answers, 0).inputs)
        logits_btv = model(inputs_bt.to(device))
        started: dict[int, Request] = {}
        for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            start, count = len(request.prompt) - 1, len(answer.tokens)
            chosen_t, _ = _SAMPLER.choose(logits_btv[row, start : start + count], request.draws(count).to(device))
            chosen = chosen_t.tolist()
            if chosen != answer.tokens:
                same = next(place for place in range(count) if chosen[place] != answer.tokens[place])
                started[row] = _continuation(request, chosen[: same + 1], stop_tokens)
        if not started:
            break
        for row, more in zip(started, roll_out(model, list(started.values()), stop_tokens, len(started)), strict=True):
            kept = list(started[row].prompt[len(requests[row].prompt) :])
            ended = more.ended or kept[-1] in stop_tokens
            answers[row] = Generated([*kept, *more.tokens], [], ended)
    model.train(training)
    return answers


def _continuation(request: Request, kept: Sequence[int], stop_tokens: Collection[int]) -> Request:
    """What is left to be written after an answer's beginning: nothing after a stop token."""
    room = 0 if kept[-1] in stop_tokens else request.max_new_tokens - len(kept)
    return Request([*request.prompt, *kept], room, request.seed, len(kept))


def answer_batch(prompts: Sequence[Sequence[int]], rollouts: Sequence[Generated], first_sample: int) -> Batch:
    """Prompts with their answers, one in a row; only the answers have targets."""
    width = max(len(prompt) + len(rollout.tokens) for prompt, rollout in zip(prompts, rollouts, strict=True))
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    targets = np.full((len(prompts), width), IGNORE_INDEX, dtype=np.int64)
    for row, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        end = len(prompt) + len(rollout.tokens)
        tokens[row, :end] = [*prompt, *rollout.tokens]
        targets[row, len(prompt) : end] = rollout.tokens
    # What follows an answer is padding: nothing before it attends to it.
    return Batch(tokens[:, :-1], targets[:, 1:], None, None, first_sample)


def _agreement(model: Transformer) -> Callable[[bool], bool]:
    """Whether any process still writes, where all must call the model equally often."""
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        return bool

    def any_running(running: bool) -> bool:
        flag = torch.tensor(float(running))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    return any_running
