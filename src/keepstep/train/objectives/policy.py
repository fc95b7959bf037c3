"""Reinforcement learning with verifiable rewards: GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025) and RLOO
(Ahmadian et al. 2024).

Shape legend: b answers, t tokens, p prompts, g answers of a prompt, n kinds of reward.

A step answers each prompt g times with the weights as they are, rewards the answers, and moves the policy towards those
that are better than the others of their group. Each answer is used for one update, so that the policy that learns is
the one that wrote it: the ratio of the two is 1, and clipping it would change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepstep.config.schema import RLConfig
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Batch
from keepstep.data.chat.prompts import Prompted
from keepstep.evaluate.continuous_batching import Generated, Request
from keepstep.models.transformer import Transformer
from keepstep.train.objectives.objective import ModelCall, Objective
from keepstep.train.objectives.preference import Reference
from keepstep.train.objectives.rewards import Answered, load_rewards
from keepstep.train.objectives.rollout import answer_batch, answer_seed, confirm, roll_out
from keepstep.train.objectives.tasks import PromptTasks

EPSILON = 1e-4
"""Added to the deviation of a group's rewards, as TRL does: a group without a difference has no signal."""

_SAMPLES = 4
"""Answers of a validation that are shown."""


@dataclass(frozen=True)
class Policy:
    """The model that answers and learns, and the one that it is held to, if any."""

    model: Transformer
    reference: Reference | None


def advantages(rewards_pg: Tensor, method: str) -> Tensor:
    """How much better each answer is than the others of its group.

    grpo: by the group's standard deviation. dr_grpo: the difference from the mean alone. rloo: the difference from the
    mean of the other answers.
    """
    centred_pg = rewards_pg - rewards_pg.mean(dim=1, keepdim=True)
    if method == "grpo":
        return centred_pg / (rewards_pg.std(dim=1, keepdim=True) + EPSILON)
    group = rewards_pg.shape[1]
    return centred_pg * group / (group - 1) if method == "rloo" else centred_pg


def policy_losses(
    log_probabilities_bt: Tensor, reference_bt: Tensor | None, advantages_b: Tensor, mask_bt: Tensor, config: RLConfig
) -> Tensor:
    """The loss of each answer, from the log-probabilities of its tokens under the policy and the reference.

    grpo: the mean over an answer's tokens. dr_grpo: the sum over `max_new_tokens`, which favours neither short nor long
    answers. rloo: the sum, because the log-probability of an answer is one.
    """
    # 1, with the gradient of the log-probability.
    ratio_bt = torch.exp(log_probabilities_bt - log_probabilities_bt.detach())
    losses_bt = -ratio_bt * advantages_b[:, None]
    if reference_bt is not None and config.method != "rloo":
        losses_bt = losses_bt + config.kl_weight * kl_estimates(log_probabilities_bt, reference_bt)
    sums_b = (losses_bt * mask_bt).sum(dim=1)
    match config.method:
        case "grpo":
            return sums_b / mask_bt.sum(dim=1).clamp(min=1)
        case "dr_grpo":
            return sums_b / config.max_new_tokens
        case _:
            return sums_b


def kl_estimates(log_probabilities_bt: Tensor, reference_bt: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: an unbiased estimate of the KL divergence that is never negative."""
    difference_bt = reference_bt - log_probabilities_bt
    return torch.exp(difference_bt) - difference_bt - 1


def _samples(answers: Sequence[Answered], rewards: Sequence[float], group: int) -> list[tuple[str, str]]:
    """The first answer to each of a few prompts, with its reward."""
    shown = list(zip(answers, rewards, strict=True))[::group][:_SAMPLES]
    return [
        (f"{answer.prompted.messages[-1]['content']}\n", f"{answer.text}\nreward {reward:.4g}")
        for answer, reward in shown
    ]


class PolicyObjective(Objective):
    """The mean loss of answers that the policy writes itself."""

    best_is = "highest validation reward"
    prepares = True

    def __init__(self, config: RLConfig, policy: Policy, tasks: PromptTasks, seed: int, *, exact: bool = False) -> None:
        """With `exact`, answers are drawn from the training forward pass itself."""
        self._config, self._policy, self._tasks, self._seed = config, policy, tasks, seed
        self._exact = exact
        self._rollouts: dict[int, list[Generated]] = {}
        """Answers of micro batches that are still to be learnt from, by their first sample."""
        self._rewards = load_rewards(list(config.rewards))
        self._weights = torch.tensor(list(config.rewards.values()), dtype=torch.float64)
        kinds = tuple(f"reward_{name.rpartition(':')[2]}" for name in config.rewards)
        self.metric_names = ("reward_mean", "response_length", "truncated_share", "no_signal_share",
                             "sampler_difference", "kl", *kinds)  # fmt: skip
        self.sum_count = 3 + len(self.metric_names)

    def count(self, batch: Batch) -> int:
        """Answers."""
        return len(batch.inputs) * self._config.num_generations

    def sums(self, call: ModelCall, batch: Batch) -> Tensor:
        """Losses; then the numbers of answers, groups and tokens, and the sums behind each metric."""
        if batch.first_sample not in self._rollouts:
            self.prepare([batch])
        rollouts = self._rollouts.pop(batch.first_sample)
        if self._exact:
            rollouts = self._confirmed(call, batch, rollouts)
        prompts = self._prompts(batch)
        answers = [
            Answered(prompted, self._tasks.decode(rollout.tokens), rollout.ended)
            for prompted, rollout in zip(prompts, rollouts, strict=True)
        ]
        rewards_bn = torch.tensor(
            [[reward(answer) for reward in self._rewards] for answer in answers], dtype=torch.float64
        )
        self.samples = _samples(answers, (rewards_bn @ self._weights).tolist(), self._config.num_generations)
        return self._learn(call, [prompted.tokens for prompted in prompts], rollouts, rewards_bn, batch.first_sample)

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Answer the prompts of these micro batches, so that short answers make room for other micro batches'."""
        asked = [self._requests(batch) for batch in batches]
        written = iter(
            roll_out(
                self._policy.model,
                [request for requests in asked for request in requests],
                self._tasks.stop_tokens,
                self._config.rollout_batch,
            )
        )
        # Those of a step that was abandoned are forgotten.
        self._rollouts = {
            batch.first_sample: list(itertools.islice(written, len(requests)))
            for batch, requests in zip(batches, asked, strict=True)
        }

    def _confirmed(self, call: ModelCall, batch: Batch, rollouts: Sequence[Generated]) -> list[Generated]:
        """Answers that the training forward pass would have drawn, with its log-probabilities."""
        requests = self._requests(batch)
        answers = confirm(self._policy.model, requests, rollouts, self._tasks.stop_tokens)
        learnt = answer_batch([request.prompt for request in requests], answers, batch.first_sample)
        with torch.no_grad():
            log_probabilities_bt = -call(learnt, each_loss=True).cpu()
        mask_bt = torch.from_numpy(learnt.targets != IGNORE_INDEX)
        return [
            replace(answer, log_probabilities=log_probabilities_t[mask_t].tolist())
            for answer, log_probabilities_t, mask_t in zip(answers, log_probabilities_bt, mask_bt, strict=True)
        ]

    def _prompts(self, batch: Batch) -> list[Prompted]:
        group = range(self._config.num_generations)
        return [self._tasks.prompts[number] for number in batch.inputs[:, 0].tolist() for _ in group]

    def _requests(self, batch: Batch) -> list[Request]:
        group = self._config.num_generations
        first = batch.first_sample // group
        return [
            Request(
                prompted.tokens,
                self._config.max_new_tokens,
                answer_seed(self._seed, first + number // group, number % group),
            )
            for number, prompted in enumerate(self._prompts(batch))
        ]

    def _learn(
        self,
        call: ModelCall,
        prompts: Sequence[Sequence[int]],
        rollouts: Sequence[Generated],
        rewards_bn: Tensor,
        first_sample: int,
    ) -> Tensor:
        config = self._config
        rewards_b = rewards_bn @ self._weights
        learnt = self._answers_with_signal(rewards_b)
        kept = [rollouts[number] for number in learnt]
        batch = answer_batch([prompts[number] for number in learnt], kept, first_sample)
        reference = self._policy.reference
        reference_bt = None if reference is None else -reference.token_losses(call, batch)
        log_probabilities_bt = -call(batch, each_loss=True)
        device = log_probabilities_bt.device
        mask_bt = torch.from_numpy(batch.targets != IGNORE_INDEX).to(device)
        if reference_bt is None:
            kl_bt = torch.full_like(log_probabilities_bt, torch.nan).where(mask_bt, 0.0)
        else:
            kl_bt = kl_estimates(log_probabilities_bt.detach(), reference_bt) * mask_bt
            if config.method == "rloo":
                # RLOO's penalty is a part of the reward: the log-ratio of the whole answer.
                moved_b = ((log_probabilities_bt.detach() - reference_bt) * mask_bt).sum(dim=1)
                rewards_b = rewards_b - config.kl_weight * moved_b.double().cpu()
        rewards_pg = rewards_b.view(-1, config.num_generations)
        advantages_b = advantages(rewards_pg, config.method).flatten()[learnt].float().to(device)
        losses_b = policy_losses(log_probabilities_bt, reference_bt, advantages_b, mask_bt, config)
        sampled_bt = torch.zeros(mask_bt.shape).masked_scatter(
            mask_bt.cpu(), torch.tensor([chance for rollout in kept for chance in rollout.log_probabilities])
        )
        difference_bt = (log_probabilities_bt.detach() - sampled_bt.to(device)).abs() * mask_bt
        # Rewards of their own, before a penalty.
        told = [
            len(rollouts),
            len(rewards_pg),
            int(mask_bt.sum()),
            (rewards_bn @ self._weights).sum(),
            sum(len(rollout.tokens) for rollout in rollouts),
            sum(not rollout.ended for rollout in rollouts),
            (rewards_pg.max(dim=1).values == rewards_pg.min(dim=1).values).sum(),
            difference_bt.sum(),
            kl_bt.sum(),
            *rewards_bn.sum(dim=0),
        ]
        return torch.cat([losses_b.sum()[None], torch.tensor([float(number) for number in told], device=device)])

    def _answers_with_signal(self, rewards_b: Tensor) -> list[int]:
        """Answers of groups with different rewards: without a KL penalty, the gradient of the others is 0.

        All in elastic mode, whose forward passes have one shape; and one group at least, for sharded processes.
        """
        group = self._config.num_generations
        if self._exact or self._policy.reference is not None:
            return list(range(len(rewards_b)))
        rewards_pg = rewards_b.view(-1, group)
        groups = (rewards_pg.max(dim=1).values != rewards_pg.min(dim=1).values).nonzero()[:, 0].tolist() or [0]
        return [number * group + answer for number in groups for answer in range(group)]

    def to_minimise(self, loss: float, metrics: Mapping[str, float]) -> float:  # noqa: ARG002
        """Rewards: the loss is about 0 whatever was learnt."""
        return -metrics["reward_mean"]

    def metrics(self, sums: Tensor) -> Tensor:
        """Means over answers, groups or tokens."""
        answers, groups, tokens, reward, length, truncated, silent, difference, kl, *kinds = sums
        means = (
            reward / answers,
            length / answers,
            truncated / answers,
            silent / groups,
            difference / tokens,
            kl / tokens,
        )
        return torch.stack([*means, *(kind / answers for kind in kinds)])
