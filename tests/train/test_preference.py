"""DPO, IPO and KTO: losses equal the papers' formulas, and runs keep every promise of the loop."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepstep.config.load import load_config
from keepstep.config.schema import PreferenceConfig, RunConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Batch
from keepstep.interop.run_data import open_run_data
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer
from keepstep.train.objectives.preference import PreferenceObjective, Reference
from tests.train.preference_rows import labelled, pairs, words
from tests.train.tiny_runs import TINY, BackgroundRun, committed_steps, losses, metrics, run_here, run_processes
from tests.train.tiny_worlds import run_world

LORA = ["lora.rank=2", "lora.targets=[q, v, up, down]"]


def config_of(tmp_path: Path, method: str, *overrides: str) -> RunConfig:
    rows = words(tmp_path / "data", labelled() if method == "kto" else pairs())
    given = [*TINY, f"runs_dir={tmp_path}", *rows, f"preference.method={method}", *overrides]
    return load_config(None, given).config


def moved_models(config: RunConfig) -> tuple[Transformer, Transformer]:
    """A reference, and a policy some way from it."""
    reference, policy = Transformer(config.model), Transformer(config.model)
    init_weights(reference, 1)
    policy.load_state_dict(reference.state_dict())
    with torch.no_grad():
        for number, weight in enumerate(policy.parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    return policy, reference


def call_on(policy: Transformer) -> Any:
    def call(batch: Batch, *, model: Transformer | None = None, each_loss: bool = False) -> Tensor:
        arrays = [torch.from_numpy(array) for array in (batch.inputs, batch.targets)]
        documents_bt = None if batch.documents is None else torch.from_numpy(batch.documents)
        output: Tensor = (model or policy)(*arrays, documents_bt=documents_bt, each_loss=each_loss)
        return output

    return call


def answers_alone(batch: Batch) -> list[list[tuple[list[int], list[int]]]]:
    """The documents of each pair as inputs and targets of their own, unpacked from the rows."""
    assert batch.documents is not None
    assert batch.labels is not None
    found = []
    for row in range(len(batch.inputs)):
        for pair in range(int((batch.labels[row] >= 0).sum())):
            places = [batch.documents[row] == 2 * pair + part for part in range(2)]
            found.append([(batch.inputs[row][at].tolist(), batch.targets[row][at].tolist()) for at in places])
    return found


def log_probability(model: Transformer, document: tuple[list[int], list[int]]) -> tuple[Tensor, int]:
    inputs, targets = document
    log_probabilities = model(torch.tensor([inputs]))[0].double().log_softmax(dim=-1)
    chosen = [log_probabilities[at, target] for at, target in enumerate(targets) if target != IGNORE_INDEX]
    return torch.stack(chosen).sum(), len(chosen)


def expected_losses(
    config: PreferenceConfig, batch: Batch, policy: Transformer, reference: Transformer
) -> tuple[Tensor, list[tuple[float, float]]]:
    """By the papers' formulas, one document at a time: losses and rewards."""
    ratios, lengths = [], []
    for documents in answers_alone(batch):
        ours = [log_probability(policy, document) for document in documents]
        theirs = [log_probability(reference, document)[0].detach() for document in documents]
        ratios.append([mine[0] - other for mine, other in zip(ours, theirs, strict=True)])
        lengths.append([mine[1] for mine in ours])
    beta = config.beta
    if config.method == "dpo":
        margins = [beta * (chosen - rejected) for chosen, rejected in ratios]
        smooth = config.label_smoothing
        each = [-(1 - smooth) * torch.sigmoid(m).log() - smooth * torch.sigmoid(-m).log() for m in margins]
    elif config.method == "ipo":
        each = [(r[0] / n[0] - r[1] / n[1] - 1 / (2 * beta)) ** 2 for r, n in zip(ratios, lengths, strict=True)]
    else:
        assert batch.labels is not None
        kl = max(0.0, sum(other.item() for _, other in ratios) / len(ratios))
        labels = batch.labels[batch.labels >= 0].tolist()
        each = [
            config.desirable_weight * (1 - torch.sigmoid(beta * (ratio - kl)))
            if label
            else config.undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio)))
            for (ratio, _), label in zip(ratios, labels, strict=True)
        ]
    return torch.stack(each), [(beta * first.item(), beta * second.item()) for first, second in ratios]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("dpo", []),
        ("dpo", ["preference.label_smoothing=0.1", "preference.beta=0.5"]),
        ("ipo", []),
        ("kto", ["preference.desirable_weight=1.3", "preference.undesirable_weight=0.7", "preference.beta=0.3"]),
    ],
)
@pytest.mark.slow
def test_losses_equal_the_papers_formulas(method: str, more: list[str], tmp_path: Path) -> None:
    config = config_of(tmp_path, method, *more)
    policy, reference = moved_models(config)
    if method == "kto":
        # The other way round the estimate is below zero, where it is cut off.
        policy, reference = reference, policy
    batch = open_run_data(config).train.rows(0, 3)
    objective = PreferenceObjective(config.preference, Reference(policy, reference))
    sums = objective.sums(call_on(policy), batch)
    expected, rewards = expected_losses(config.preference, batch, policy, reference)
    assert objective.count(batch) == len(expected) > 3, "rows are packed"
    assert sums[0].item() == pytest.approx(expected.sum().item(), rel=1e-4)
    named = dict(zip(objective.metric_names, objective.metrics(sums[1:].double()).tolist(), strict=True))
    if method == "kto":
        assert batch.labels is not None
        labels = batch.labels[batch.labels >= 0].tolist()
        wanted = [first for (first, _), label in zip(rewards, labels, strict=True) if label]
        assert named["reward_chosen"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-4)
        assert named["kl"] > 0
    else:
        correct = sum(chosen > rejected for chosen, rejected in rewards)
        assert named["reward_accuracy"] == pytest.approx(correct / len(rewards))
        assert named["reward_margin"] == pytest.approx(sum(a - b for a, b in rewards) / len(rewards), abs=1e-4)

    weights = list(policy.parameters())
    found = torch.autograd.grad(sums[0], weights)
    wanted_grads = torch.autograd.grad(expected.sum(), weights)
    for mine, theirs in zip(found, wanted_grads, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=2e-4, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "ipo", "kto"])
def test_run_starts_at_the_reference_and_learns(method: str, tmp_path: Path) -> None:
    rows = words(tmp_path / "data", labelled() if method == "kto" else pairs())
    run_here(tmp_path, *rows, f"preference.method={method}", "max_duration=10ba")
    start = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}[method]
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(start, abs=1e-6)
    assert steps[0]["reward_chosen"] == steps[0]["reward_rejected"] == 0.0
    assert steps[-1]["loss"] < start
    assert steps[-1]["reward_margin"] > 0
    (valid,) = [line for line in metrics(tmp_path) if "valid_loss" in line]
    assert "valid_reward_margin" in valid
    assert "valid_ppl" not in valid


@pytest.mark.slow
def test_processes_microbatches_and_packing_do_not_change_the_losses(tmp_path: Path) -> None:
    rows = [*words(tmp_path / "data", pairs()), "preference.method=dpo", "optimizer.lr=1e-4", "chat.packing=false"]
    run_here(tmp_path, *rows, "name=one")
    run_here(tmp_path, *rows, "name=whole", "microbatch=4")
    assert run_world(tmp_path, 2, *rows, "name=sharded") == [0, 0]
    assert run_world(tmp_path, 2, *rows, "name=copies", "parallel.replicate=2", "parallel.shard=1") == [0, 0]
    for name in ("whole", "sharded", "copies"):
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "one"), abs=1e-4)
    run_here(tmp_path, *rows, "name=exact", "reproducible=elastic", "microbatch=1")
    assert run_world(tmp_path, 2, *rows, "name=exact2", "reproducible=elastic", "microbatch=1") == [0, 0]
    shown = [[{key: line[key] for key in line if key == "loss" or "reward" in key} for line in metrics(tmp_path, name)]
             for name in ("exact", "exact2")]  # fmt: skip
    assert shown[0] == shown[1], "elastic: the same bits with any number of processes, metrics included"


@pytest.mark.slow
def test_adapters_are_compared_with_the_model_without_them(tmp_path: Path) -> None:
    rows = [*words(tmp_path / "data", pairs()), "preference.method=dpo"]
    run_here(tmp_path, *rows, *LORA, "name=lora", "lora.dropout=0.1", "optimizer.lr=1e-2")
    first, *_, last = (line for line in metrics(tmp_path, "lora") if "loss" in line)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6), "adapters start at zero"
    assert last["reward_margin"] > 0.05


@pytest.mark.slow
def test_reference_stays_the_start_when_its_run_trains_on(tmp_path: Path) -> None:
    rows = words(tmp_path / "data", pairs())
    shape = [*rows, "data.path=synthetic"]
    run_here(tmp_path, *shape, "name=base", "max_duration=3ba")
    tuned = [*rows, "preference.method=dpo", f"finetune.start_from={tmp_path}/base"]
    run_here(tmp_path, *tuned, "name=whole")
    run_here(tmp_path, *tuned, "name=cut", "checkpoint.interval=3ba", "checkpoint.at_end=false")
    run_here(tmp_path, *shape, "name=base", "max_duration=6ba")
    run_here(tmp_path, *tuned, "name=cut")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "more", "processes"), [("dpo", [], 2), ("kto", LORA, 1)])
def test_killed_run_resumes_with_equal_losses(method: str, more: list[str], processes: int, tmp_path: Path) -> None:
    rows = words(tmp_path / "data", labelled() if method == "kto" else pairs())
    rows += [f"preference.method={method}", *more, "max_duration=12ba", "checkpoint.interval=3ba"]
    assert run_processes(tmp_path, processes, *rows, "name=whole").returncode == 0
    alone = [*rows, "name=killed", "resilience.snapshot_interval=0", "resilience.max_restarts=0"]
    for step in (3, 6):
        run = BackgroundRun(tmp_path, processes, *alone, output=tmp_path / f"killed_{step}.txt")
        run.wait_until(lambda step=step: max(committed_steps(tmp_path, "killed"), default=0) >= step)
        run.process.send_signal(signal.SIGKILL)
        run.end()
    assert run_processes(tmp_path, processes, *alone).returncode == 0
    assert losses(tmp_path, "killed") == losses(tmp_path, "whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preference.method=dpo", "parallel.pipeline=2"], r"method is 'dpo', but it needs parallel\.pipeline=1"),
        (["preference.method=dpo", "precision=fp8"], "precision is fp8"),
        (["preference.method=dpo", "chat.loss_on=all"], "compares what the assistant says"),
        (["preference.method=ipo", "preference.label_smoothing=0.1"], "has no effect with preference.method ipo"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*TINY, *overrides])


@pytest.mark.slow
def test_data_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs files with pairs of answers"):
        open_run_data(config_of(tmp_path, "dpo", "data.path=synthetic"))
    (tmp_path / "sft.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(DataError, match="holds no pair of answers"):
        open_run_data(config_of(tmp_path, "dpo", f"data.path={tmp_path}/sft.jsonl"))
