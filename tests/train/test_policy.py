"""GRPO, Dr. GRPO and RLOO: losses equal the formulas, rollouts depend on weights and seeds, kills change nothing."""

from __future__ import annotations

import os
import signal
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.config.schema import RLConfig, RunConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.data.batch import Batch
from keepstep.data.chat.prompts import Prompted
from keepstep.data.chat.rows import canonical
from keepstep.evaluate.continuous_batching import Request
from keepstep.evaluate.draw import Sampler
from keepstep.interop.run_data import open_run_data
from keepstep.models.transformer import Transformer
from keepstep.observe.history import open_history
from keepstep.observe.run_folder import RunFolder
from keepstep.train.objectives.policy import Policy, PolicyObjective
from keepstep.train.objectives.preference import Reference
from keepstep.train.objectives.rewards import Answered, load_rewards
from keepstep.train.objectives.rollout import answer_seed, confirm, roll_out
from keepstep.train.objectives.tasks import PromptTasks
from tests.train.preference_rows import TOOL, letter_share, questions, rl_words
from tests.train.test_preference import LORA, call_on, log_probability, moved_models
from tests.train.tiny_runs import TINY, BackgroundRun, committed_steps, metrics, run_here, run_processes
from tests.train.tiny_worlds import run_world

REWARDS = "rl.rewards={tests.train.preference_rows:deadly_reward: 1.0}"


def config_of(tmp_path: Path, method: str, *overrides: str) -> RunConfig:
    return load_config(None, [*TINY, f"runs_dir={tmp_path}", *rl_words(tmp_path / "data", method), *overrides]).config


def learnt(root: Path, name: str) -> list[dict[str, float]]:
    """By step: the loss, how many samples were used, and everything about rewards; the last time it was done."""
    steps = {}
    for line in metrics(root, name):
        if "loss" in line:
            kept = ("loss", "grad_norm", "samples", "kl", "response_length", "sampler_difference")
            steps[line["step"]] = {key: line[key] for key in line if key in kept or key.startswith("reward")}
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize(
    ("method", "beta"), [("grpo", 0.0), ("grpo", 0.3), ("dr_grpo", 0.2), ("rloo", 0.0), ("rloo", 0.3)]
)
@pytest.mark.slow
def test_losses_equal_the_papers_formulas(method: str, beta: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, method, f"rl.beta={beta}")
    policy, reference = moved_models(config)
    loaders = open_run_data(config)
    tasks = PromptTasks.of(loaders, "")
    batch = loaders.train.rows(0, 8)
    held_to = Reference(policy, reference) if beta else None
    objective = PolicyObjective(config.rl, Policy(policy, held_to), tasks, config.seed)
    assert objective.count(batch) == 8
    sums = objective.sums(call_on(policy), batch)

    losses, rewards, groups = [], [], []
    for row, number in enumerate(batch.inputs[:, 0].tolist()):
        asked = tasks.prompts[number]
        group: list[tuple[float, Any, Any, int]] = []
        for answer in range(4):
            request = Request(asked.tokens, 12, answer_seed(config.seed, row, answer))
            (rollout,) = roll_out(policy, [request], tasks.stop_tokens, 1)
            document = [*asked.tokens, *rollout.tokens]
            targets = [-100] * (len(asked.tokens) - 1) + rollout.tokens
            each = policy(torch.tensor([document[:-1]]))[0].double().log_softmax(-1)
            theirs = reference(torch.tensor([document[:-1]]))[0].double().log_softmax(-1).detach()
            places = [(at, target) for at, target in enumerate(targets) if target >= 0]
            ours = torch.stack([each[place] for place in places])
            other = torch.stack([theirs[place] for place in places])
            text = tasks.tokenizer.decode(rollout.tokens, skip_special_tokens=False)
            reward = letter_share(asked.messages, text, [{"name": "weather"}])
            rewards.append(reward)
            group.append((reward, ours, other, len(places)))
        worth = [
            reward - (beta * float((ours.detach() - other).sum()) if method == "rloo" else 0.0)
            for reward, ours, other, _ in group
        ]
        groups.append(worth)
        for place, (_, ours, other, tokens) in enumerate(group):
            rest = worth[:place] + worth[place + 1 :]
            match method:
                case "grpo":
                    advantage = (worth[place] - statistics.mean(worth)) / (statistics.stdev(worth) + 1e-4)
                case "dr_grpo":
                    advantage = worth[place] - statistics.mean(worth)
                case _:
                    advantage = worth[place] - statistics.mean(rest)
            gained = advantage * (ours - ours.detach()).exp()
            kl = (other - ours).exp() - (other - ours) - 1
            per_token = -gained + (beta * kl if method != "rloo" else 0.0)
            losses.append(per_token.sum() / {"grpo": tokens, "dr_grpo": 12, "rloo": 1}[method])
    expected = torch.stack(losses).sum()
    assert sums[0].item() == pytest.approx(expected.item(), abs=1e-3, rel=1e-3)
    named = dict(zip(objective.metric_names, objective.metrics(sums[1:]).tolist(), strict=True))
    assert named["reward_mean"] == pytest.approx(statistics.mean(rewards), abs=1e-6)
    assert named["sampler_difference"] < 1e-5
    weights = list(policy.parameters())
    found, wanted = (torch.autograd.grad(loss, weights) for loss in (sums[0], expected))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=2e-3, rtol=5e-3)


@pytest.mark.slow
def test_groups_without_a_signal_need_no_forward_pass(tmp_path: Path) -> None:
    config = config_of(tmp_path, "grpo", "rl.beta=0")
    policy, _ = moved_models(config)
    loaders = open_run_data(config)
    batch, tasks = loaders.train.rows(0, 8), PromptTasks.of(loaders, "")
    forwards = []

    def sums_of(*, all_answers: bool) -> torch.Tensor:
        objective = PolicyObjective(config.rl, Policy(policy, None), tasks, 0)
        # The first group has equal rewards, the second has not.
        rewards = iter([1.0] * 4 + [0.0, 0.0, 1.0, 0.0])
        objective._rewards = [lambda _: next(rewards), lambda _: 0.0]
        if all_answers:
            objective._answers_with_signal = lambda rewards_b: list(range(len(rewards_b)))  # type: ignore[method-assign]

        def call(batch: Batch, *, model: Transformer | None = None, each_loss: bool = False) -> torch.Tensor:
            forwards.append(len(batch.inputs))
            losses: torch.Tensor = call_on(policy)(batch, model=model, each_loss=each_loss)
            return losses

        return objective.sums(call, batch)

    fewer, all_of_them = sums_of(all_answers=False), sums_of(all_answers=True)
    assert forwards == [4, 8]
    torch.testing.assert_close(fewer[0], all_of_them[0], atol=1e-5, rtol=1e-4)
    weights = list(policy.parameters())
    for mine, theirs in zip(*(torch.autograd.grad(sums[0], weights) for sums in (fewer, all_of_them)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_draws_follow_the_distribution() -> None:
    logits_bv = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().repeat(4000, 1)
    draws_b = torch.rand(4000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    chosen_b, chance_b = Sampler(temperature=1.0).choose(logits_bv, draws_b)
    assert chance_b is not None
    shares = torch.bincount(chosen_b, minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.0, 0.7]), atol=0.03, rtol=0.0)
    torch.testing.assert_close(chance_b, logits_bv[0][chosen_b])


def test_draws_are_those_of_the_cumulative_distribution() -> None:
    # More than one block of the vocabulary, tokens that cannot be drawn at its end, and draws at both ends.
    logits_bv = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3)) * 3
    logits_bv[:, 900:] = -torch.inf
    draws_b = torch.rand(64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    draws_b[:2] = torch.tensor([0.0, 1.0])
    chosen_b, chance_b = Sampler(temperature=1.0).choose(logits_bv, draws_b)
    assert chance_b is not None
    cumulative_bv = logits_bv.log_softmax(-1).double().exp().cumsum(-1)
    wanted_b1 = (draws_b * cumulative_bv[:, -1])[:, None] * (1 - 1e-12)
    assert chosen_b.equal(torch.searchsorted(cumulative_bv, wanted_b1, right=True)[:, 0])
    assert chosen_b.max() < 900
    assert torch.isfinite(chance_b).all()


@pytest.mark.slow
def test_answers_depend_on_their_own_seed_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, "grpo")
    model, _ = moved_models(config)
    prompts = [[5, 6, 7], [8], [9, 10], [5, 6, 7]]
    requests = [Request(prompt, 10, answer_seed(17, number, 0)) for number, prompt in enumerate(prompts)]
    together = roll_out(model, requests, {3}, 4)
    alone = [roll_out(model, [request], {3}, 1)[0] for request in requests]
    for rows in (2, 3, 4):
        assert [one.tokens for one in roll_out(model, requests, {3}, rows)] == [one.tokens for one in alone]
    assert roll_out(model, requests, {3}, 4) == together
    inputs, targets = [*prompts[0], *together[0].tokens], together[0].tokens
    document = inputs[:-1], [-100] * (len(prompts[0]) - 1) + targets
    assert sum(together[0].log_probabilities) == pytest.approx(log_probability(model, document)[0].item(), abs=1e-4)
    assert len({answer_seed(*place) for place in ((1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 23, 0), (12, 3, 0))}) == 5
    assert isinstance(model, Transformer)
    assert model.training


@pytest.mark.slow
def test_answers_are_those_of_the_training_forward_pass(tmp_path: Path) -> None:
    config = config_of(tmp_path, "grpo", "reproducible=elastic")
    model, _ = moved_models(config)
    requests = [Request([5, 6, number], 10, answer_seed(17, number, 0)) for number in range(6)]
    answers = roll_out(model, requests, {3}, 6)
    # As if rounding had decided otherwise while these were decoded: in the middle, at the end, and at a stop token.
    damaged = [
        replace(answer, tokens=[*answer.tokens[:place], (answer.tokens[place] + 1) % 128, *rest], ended=False)
        for answer, place, rest in zip(answers, (0, 3, -1), ([7] * 9, [8, 8], []), strict=False)
    ]
    confirmed = confirm(model, requests, [*damaged, *answers[3:]], {3})
    assert [(one.tokens, one.ended) for one in confirmed] == [(one.tokens, one.ended) for one in answers]
    assert confirm(model, requests, answers, {3}) == answers
    assert model.training


@pytest.mark.slow
def test_sampler_and_training_have_equal_log_probabilities_in_elastic_mode(tmp_path: Path) -> None:
    more = ["max_duration=2ba", "reproducible=elastic", "evaluate.at_end=false", "checkpoint.at_end=false"]
    run_here(tmp_path, *rl_words(tmp_path / "data"), *more)
    assert [line["sampler_difference"] for line in learnt(tmp_path, "run")] == [0.0, 0.0]


@pytest.mark.slow
def test_validation_shows_answers_with_their_rewards(tmp_path: Path) -> None:
    run_here(
        tmp_path, *rl_words(tmp_path / "data"), "max_duration=1ba", "evaluate.batches=1", "checkpoint.at_end=false"
    )
    samples = open_history(RunFolder(tmp_path / "run")).newest_samples()
    asked = {row["messages"][0]["content"] + "\n" for row in questions()}
    assert samples
    for line in samples:
        answer, _, reward = line["text"].rpartition("\nreward ")
        share = letter_share([{"role": "user"}], answer, [{"name": "weather"}])
        assert line["step"] == 1
        assert line["prompt"] in asked
        assert float(reward) in (pytest.approx(share, abs=1e-3), pytest.approx(share + 0.5, abs=1e-3))


@pytest.mark.slow
def test_answer_ends_at_a_stop_token(tmp_path: Path) -> None:
    model, _ = moved_models(config_of(tmp_path, "grpo"))
    first = roll_out(model, [Request([5], 6, 1)], set(), 1)[0]
    assert (len(first.tokens), first.ended) == (6, False)
    cut = roll_out(model, [Request([5], 6, 1)], {first.tokens[2]}, 1)[0]
    assert (cut.tokens, cut.ended) == (first.tokens[: first.tokens.index(first.tokens[2]) + 1], True)


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', [1, 1, 1, 1]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>', [0, 2 / 3, 1, 1]),
        ('<tool_call>{"name": "weather", "arguments": {"city": 3}}</tool_call>', [0, 2 / 3, 0, 1]),
        ('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', [0, 1 / 2, 0, 1]),
        ('<tool_call>{"name": "climate", "arguments": {"city": "Rome"}}</tool_call>', [0, 0, 0, 1]),
        ('<tool_call>{"name": "weather", </tool_call>', [0, 0, 0, 0]),
        ("It rains.", [0, 0, 0, 1]),
        ("", [0, 0, 0, 0]),
    ],
)
def test_built_in_rewards(text: str, scores: list[int]) -> None:
    asked = _asked_for({"city": "Rome"})
    rewards = load_rewards(["tool_calls", "arguments", "schema", "format"])
    assert [reward(Answered(asked, text, ended=True)) for reward in rewards] == pytest.approx(scores)
    assert rewards[3](Answered(asked, text, ended=False)) == 0


@pytest.mark.parametrize(
    ("cities", "score"),
    [
        (["Rome", "Oslo"], 1.0),
        (["Oslo", "Rome"], 1.0),
        # One call of two: 3 of 6 facts, and none too much.
        (["Oslo"], 2 * 3 / 9),
        # All of them, and a third one too much.
        (["Rome", "Oslo", "Lima"], 2 * 6 / 15),
        (["Rome", "Lima"], 2 * 5 / 12),
        (["Rome", "Rome"], 2 * 5 / 12),
        ([], 0.0),
    ],
)
def test_reward_of_arguments_compares_each_call_with_the_nearest(cities: list[str], score: float) -> None:
    (reward,) = load_rewards(["arguments"])
    text = "".join(
        f'<tool_call>{{"name": "weather", "arguments": {{"city": "{city}"}}}}</tool_call>' for city in cities
    )
    asked = _asked_for({"city": "Rome"}, {"city": "Oslo"})
    assert reward(Answered(asked, text, ended=True)) == pytest.approx(score)


def _asked_for(*all_arguments: dict[str, str]) -> Prompted:
    calls = [{"function": {"name": "weather", "arguments": arguments}} for arguments in all_arguments]
    answer = {"role": "assistant", "tool_calls": calls}
    return Prompted([1], canonical([{"role": "user", "content": "?"}, answer], [TOOL]))


def test_refusal_is_rewarded_where_nothing_is_to_be_called() -> None:
    answer = {"role": "assistant", "content": "No tool fits."}
    asked = Prompted([1], canonical([{"role": "user", "content": "?"}, answer], [TOOL]))
    rewards = load_rewards(["tool_calls", "arguments", "schema"])
    assert [reward(Answered(asked, "I cannot.", ended=True)) for reward in rewards] == [1, 1, 1]
    calls = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert [reward(Answered(asked, calls, ended=True)) for reward in rewards[:2]] == [0, 0]


@pytest.mark.slow
def test_epoch_asks_every_prompt_once(tmp_path: Path) -> None:
    train = open_run_data(config_of(tmp_path, "grpo")).train
    prompts = train.samples_per_epoch // 4
    one = [int(train.rows(4 * number, 4).inputs[0, 0]) for number in range(prompts)]
    assert sorted(one) == list(range(prompts))
    assert train.rows(8, 8).inputs[:, 0].tolist() == one[2:4], "micro batches of any size ask the same prompts"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["microbatch=6", "global_batch=12"],
            r"microbatch is 6, but it must be a multiple of rl\.num_generations \(4\)",
        ),
        (["rl.max_new_tokens=384"], r"must be below model\.seq_len \(384\)"),
        (["rl.rewards={tool_call: 1.0}"], "has tool_call, which is no plug-in"),
        (["rl.rewards={}"], r"rl\.rewards is .*, but it must name a reward"),
        (["rl.rewards={format: 0}"], "must have a weight other than 0 for format"),
        (["preference.method=dpo"], r"cannot be combined with preference\.method dpo"),
        (["parallel.tensor=2"], r"rl\.method is 'grpo', but it needs parallel\.tensor=1"),
    ],
)
@pytest.mark.slow
def test_settings_that_do_not_fit_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, "grpo", *overrides)


def test_default_of_beta_is_that_of_trl() -> None:
    assert [RLConfig(method=method).kl_weight for method in ("grpo", "dr_grpo", "rloo")] == [0.0, 0.0, 0.05]
    assert RunConfig(rl=RLConfig(method="rloo")).has_reference
    assert not RunConfig(rl=RLConfig(method="rloo", beta=0.0)).has_reference


@pytest.mark.slow
def test_prompts_without_room_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no conversation"):
        open_run_data(config_of(tmp_path, "grpo", "rl.max_new_tokens=380"))
    with pytest.raises(DataError, match="reinforcement learning needs conversations"):
        open_run_data(config_of(tmp_path, "grpo", "data.path=synthetic"))


@pytest.mark.slow
def test_policy_learns_what_is_rewarded(tmp_path: Path) -> None:
    more = ["max_duration=40ba", "optimizer.lr=1e-2", "global_batch=64", "microbatch=64", "rl.num_generations=16"]
    run_here(tmp_path, *rl_words(tmp_path / "data"), *more, "rl.max_new_tokens=6", "evaluate.at_end=false")
    rewards = [line["reward_mean"] for line in learnt(tmp_path, "run")]
    assert statistics.mean(rewards[-5:]) > 2 * statistics.mean(rewards[:5])


@pytest.mark.slow
def test_processes_do_not_change_what_is_learnt(tmp_path: Path) -> None:
    rows = [*rl_words(tmp_path / "data"), "rl.beta=0.1", "max_duration=3ba"]
    run_here(tmp_path, *rows, "name=one")
    assert run_world(tmp_path, 2, *rows, "name=sharded") == [0, 0]
    for one, two in zip(learnt(tmp_path, "one"), learnt(tmp_path, "sharded"), strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    run_here(tmp_path, *rows, "name=exact", "reproducible=elastic")
    assert run_world(tmp_path, 2, *rows, "name=exact2", "reproducible=elastic") == [0, 0]
    assert learnt(tmp_path, "exact2") == learnt(tmp_path, "exact")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "more"), [(1, []), (2, []), (1, LORA)])
def test_kills_inside_a_step_change_nothing(
    processes: int, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*rl_words(tmp_path / "data"), *more, REWARDS, "rl.beta=0.1", "max_duration=6ba", "checkpoint.interval=2ba"]
    monkeypatch.setenv("DEADLY_ANSWERS", "")
    monkeypatch.setenv("REWARD_FOLDER", str(tmp_path))
    assert run_processes(tmp_path, processes, *rows, "name=whole").returncode == 0
    asked = (tmp_path / "asked.txt").rename(tmp_path / "asked_whole.txt").read_text().splitlines()
    # While the second and later the fifth step's answers are rewarded, and once on the way to the same place.
    monkeypatch.setenv("DEADLY_ANSWERS", "11 13 40")
    killed = run_processes(tmp_path, processes, *rows, "name=killed")
    assert killed.returncode == 0, killed.stderr
    again = (tmp_path / "asked.txt").read_text().splitlines()
    assert len(again) > len(asked), "the answers of killed steps were written again"
    assert set(again) == set(asked)
    assert learnt(tmp_path, "killed") == learnt(tmp_path, "whole")


@pytest.mark.slow
def test_run_killed_from_outside_resumes_with_equal_rewards(tmp_path: Path) -> None:
    rows = [*rl_words(tmp_path / "data"), "max_duration=8ba", "checkpoint.interval=1ba", "rl.max_new_tokens=48"]
    assert run_processes(tmp_path, 1, *rows, "name=whole").returncode == 0
    for step in (1, 3, 5):
        run = BackgroundRun(tmp_path, 1, *rows, "name=killed", "resilience.max_restarts=0", output=tmp_path / "out.txt")
        # A step is almost only its rollout: the kill falls into the next one.
        run.wait_until(lambda step=step: max(committed_steps(tmp_path, "killed"), default=0) >= step)
        os.kill(run.process.pid, signal.SIGKILL)
        run.end()
    assert run_processes(tmp_path, 1, *rows, "name=killed").returncode == 0
    assert learnt(tmp_path, "killed") == learnt(tmp_path, "whole")
