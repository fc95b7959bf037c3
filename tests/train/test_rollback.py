"""The guard in whole runs: what a bad step does to what comes after it, and what is left to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.core.errors import DivergedError
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Batch
from keepstep.data.step_feed import step_start
from keepstep.train.elastic_step import ElasticStep
from keepstep.train.optim.optimizer import Optimizers
from keepstep.train.recovery.corruption_check import odd_ranks
from keepstep.train.recovery.skipped_samples import read_skipped
from keepstep.train.step import TrainStep
from tests.train.tiny_runs import losses, metrics, run_here
from tests.train.tiny_worlds import run_world

MODES = [["precision=fp32"], ["precision=bf16"], ["optimizer=muon"], ["reproducible=elastic"]]


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Spoil the gradient of these steps of the next run, counted as they are computed."""
    calls = iter(range(1, 1000))
    monkeypatch.setattr(TrainStep, "poison", staticmethod(lambda: next(calls) in steps))


def by_step(root: Path, name: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(root, name) if "loss" in line}


def events(root: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (root / name / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "step_type"), [("precision=bf16", TrainStep), ("reproducible=elastic", ElasticStep)])
def test_guard_skips_a_step_without_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, step_type: Any
) -> None:
    calls, real = iter(range(1, 1000)), step_type.run

    def run(step: Any, batches: list[Batch], *words: Any, **more: Any) -> torch.Tensor:
        if next(calls) == 3:
            batches = [replace(batch, targets=np.full_like(batch.targets, IGNORE_INDEX)) for batch in batches]
        return real(step, batches, *words, **more)

    monkeypatch.setattr(step_type, "run", run)
    run_here(tmp_path, "name=empty", mode)
    assert "step 3: no token of its samples has a target: skipped, weights are as before" in capsys.readouterr().err
    (event,) = events(tmp_path, "empty", "guard")
    assert (event["step"], event["what"], event["action"]) == (3, "no targets", "skip")
    assert sorted(by_step(tmp_path, "empty")) == [1, 2, *range(4, len(by_step(tmp_path, "empty")) + 2)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda words: words[0])
def test_skipped_step_changes_no_weights_or_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    poison(monkeypatch, 3)
    run_here(tmp_path, "name=poisoned", *mode)
    monkeypatch.undo()

    # The same run without poison, in which the third update is simply not made.
    calls, real = iter(range(1, 1000)), Optimizers.step
    monkeypatch.setattr(Optimizers, "step", lambda *words: None if next(calls) == 3 else real(*words))
    run_here(tmp_path, "name=without", *mode)

    poisoned, without = by_step(tmp_path, "poisoned"), by_step(tmp_path, "without")
    assert without.pop(3)
    assert poisoned == without
    (event,) = events(tmp_path, "poisoned", "guard")
    assert (event["step"], event["what"], event["action"]) == (3, "nan", "skip")
    assert (event["first_sample"], event["count"]) == (16, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda words: words[0])
def test_rollback_equals_a_run_without_those_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    words = [*mode, "guard.nan=rollback", "guard.keep_interval=2", "model.dropout=0.1", "max_duration=8ba"]
    poison(monkeypatch, 4)
    run_here(tmp_path, "name=rolled", *words, "checkpoint.interval=3ba")
    monkeypatch.undo()
    skipped = (tmp_path / "rolled" / "skipped.jsonl").read_text()
    assert json.loads(skipped) == {"first_sample": 24, "count": 8, "step": 4}
    (event,) = events(tmp_path, "rolled", "guard")
    assert (event["action"], event["first_sample"]) == ("rollback", 24)

    (tmp_path / "never").mkdir()
    (tmp_path / "never" / "skipped.jsonl").write_text(skipped)
    run_here(tmp_path, "name=never", *words)
    assert losses(tmp_path, "rolled") == losses(tmp_path, "never")
    last = [line for line in metrics(tmp_path, "rolled") if "loss" in line][-1]
    assert (last["step"], last["samples"]) == (8, 72), "the data is one step ahead of the count of steps"

    # And so does a run that goes on from a checkpoint of before the bad step.
    for folder in (tmp_path / "rolled" / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > 3:
            folder.rename(tmp_path / folder.name)
    run_here(tmp_path, "name=rolled", *words)
    assert losses(tmp_path, "rolled") == losses(tmp_path, "never")


@pytest.mark.slow
def test_rollback_repeats_a_bad_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 6)
    run_here(tmp_path, "guard.nan=rollback", "checkpoint.interval=6ba")
    assert sorted(by_step(tmp_path, "run")) == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in events(tmp_path, "run", "checkpoint_committed")] == [6]


@pytest.mark.slow
def test_guard_limit_ends_the_run_and_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, *range(3, 100))
    with pytest.raises(DivergedError, match=r"guard\.limit allows 2") as caught:
        run_here(tmp_path, "guard.limit=2", "checkpoint.interval=1ba", "max_duration=20ba")
    assert caught.value.hint
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert [int(folder.name.removeprefix("step_")) for folder in saved] == [1, 2]


@pytest.mark.slow
def test_outlier_gradient_is_logged_with_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = TrainStep._gradient_norm, iter(range(1, 1000))
    monkeypatch.setattr(TrainStep, "_gradient_norm", lambda step: real(step) * (1000 if next(calls) == 18 else 1))
    run_here(tmp_path, "max_duration=19ba")
    (event,) = events(tmp_path, "run", "outlier")
    assert (event["step"], event["first_sample"], event["count"]) == (18, 136, 8)
    assert event["norm"] > 10 * event["usual"]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "named"), [(2, [0, 1]), (3, [1])])
def test_corruption_check_names_a_flipped_bit(tmp_path: Path, processes: int, named: list[int]) -> None:
    words = ["reproducible=elastic", "guard.recheck_interval=2", "name=flipped"]
    codes = run_world(tmp_path, processes, *words, flip_weight_on=1)
    assert codes == [5] * processes, (tmp_path / "said_0.txt").read_text()
    (fault,) = [event for event in events(tmp_path, "flipped", "fault") if "ranks" in event]
    assert (fault["step"], fault["ranks"], fault["reason"]) == (4, named, "corruption")
    assert "rank 1 on" in (tmp_path / "said_0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2"], ["parallel.replicate=2"], ["optimizer=muon"]])
def test_sound_processes_pass_the_check_and_skip_together(tmp_path: Path, layout: list[str]) -> None:
    codes = run_world(tmp_path, 2, *layout, "guard.recheck_interval=2", "guard.nan=rollback", "name=sound", poison_on=1)
    assert codes == [0, 0], (tmp_path / "said_0.txt").read_text()
    assert sorted(by_step(tmp_path, "sound")) == [1, 2, 3, 4, 5, 6]
    (event,) = events(tmp_path, "sound", "guard")
    assert (event["step"], event["action"]) == (3, "rollback")


def test_odd_ranks_finds_the_minority() -> None:
    assert odd_ranks([(0, 7), (0, 7), (0, 7)]) == []
    assert odd_ranks([(0, 7), (0, 8), (0, 7)]) == [1]
    assert odd_ranks([(0, 7), (1, 8), (0, 7), (1, 8)]) == []
    assert odd_ranks([(0, 7), (1, 8), (0, 7), (1, 9)]) == [1, 3]


@pytest.mark.parametrize(
    ("at", "start"), [(0, 0), (8, 16), (12, 16), (1, 16), (16, 16), (30, 46), (17, 17), (32, 46), (46, 46)]
)
def test_steps_start_where_nothing_is_left_out(at: int, start: int) -> None:
    assert step_start(at, 8, [(38, 8), (8, 8), (30, 8)]) == start


def test_no_skipped_factor_changes_an_optimizer() -> None:
    weight = torch.nn.Linear(4, 4)
    from keepstep.config.schema import OptimizerConfig

    optimizers = Optimizers(weight, OptimizerConfig())
    before = [item.clone() for item in weight.parameters()]
    for item in weight.parameters():
        item.grad = torch.full_like(item, torch.nan)
    optimizers.step(1.0, torch.tensor(torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(before, weight.parameters(), strict=True))
    assert {float(slots["step"]) for slots in optimizers.state().values()} == {0.0}


@pytest.mark.slow
def test_skipped_samples_accept_a_missing_newline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "skipped.jsonl").write_text('{"first_sample": 0, "count": 8}')
    poison(monkeypatch, 2)
    run_here(tmp_path, "guard.nan=rollback")
    monkeypatch.undo()
    assert read_skipped(tmp_path / "run" / "skipped.jsonl") == [(0, 8), (16, 8)]
    run_here(tmp_path, "guard.nan=rollback", "max_duration=8ba")
