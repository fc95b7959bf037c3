"""`keepstep bench step --tune`: the plan's candidates are measured, failures are caught, the fastest is written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from keepstep.cli.main import main
from keepstep.config.hf_config import hf_config_of
from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import HardwareError, PreflightError, UsageError
from keepstep.train import tune as tuning
from keepstep.train.tune import Settings, Trial, fastest, tune

TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
    "global_batch=4", "microbatch=1", "compute.device=cpu", "compute.threads=1",
]  # fmt: skip


def configured(settings: Settings) -> RunConfig:
    return load_config(None, [*TINY, *(f"{name}={value}" for name, value in settings.items())]).config


def measured_as(monkeypatch: pytest.MonkeyPatch, speed: Any) -> list[RunConfig]:
    """Every trial is as fast as `speed` says, which may raise; returns the configurations that were tried."""
    tried: list[RunConfig] = []

    def bench(config: RunConfig, *_: Any, **__: Any) -> SimpleNamespace:
        tried.append(config)
        return SimpleNamespace(tokens_per_s=speed(config), peak_memory_gib=1.0)

    monkeypatch.setattr(tuning, "bench_step", bench)
    return tried


def tuned(most: int, report: Any = lambda _: None) -> list[Trial]:
    """All trials, fastest first."""
    return sorted(tune(configured, most, 2, report), key=lambda trial: -trial.tokens_per_s)


@pytest.mark.slow
def test_settings_from_the_plan_are_measured_and_the_fastest_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = measured_as(monkeypatch, lambda config: 100.0 * config.microbatch)
    lines: list[str] = []
    trials = tuned(8, lines.append)
    assert {config.microbatch for config in tried} == {1, 2, 4}
    assert {config.compute.recompute for config in tried} == {"none", "full"}
    assert trials[0].settings["microbatch"] == "4"
    # Chunks of the loss are tried on the fastest alone, and no faster: so they are left out.
    assert any(config.compute.loss_chunks == 2 and config.microbatch == 4 for config in tried)
    best = fastest(trials)
    assert best is not None
    assert "compute.loss_chunks" not in best.settings
    assert len(lines) == 1 + len(trials)


@pytest.mark.slow
def test_a_faster_single_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, lambda config: 200.0 if config.compute.loss_chunks == 2 else 100.0)
    best = fastest(tuned(2))
    assert best is not None
    assert best.settings["compute.loss_chunks"] == "2"


@pytest.mark.slow
def test_most_limits_what_is_measured_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = measured_as(monkeypatch, lambda _: 1.0)
    tuned(1)
    assert len([config for config in tried if not config.compute.loss_chunks]) == 1


@pytest.mark.slow
def test_running_out_of_memory_ends_a_trial_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(config: RunConfig) -> float:
        if config.microbatch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 50.0

    measured_as(monkeypatch, speed)
    trials = tuned(8)
    assert trials[0].settings["microbatch"] == "1"
    assert {trial.failure for trial in trials if trial.settings["microbatch"] != "1"} == {"out of memory"}


@pytest.mark.slow
def test_no_trial_that_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(_: RunConfig) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    measured_as(monkeypatch, speed)
    with pytest.raises(HardwareError, match="none of the trials fits"):
        tuned(2)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out of memory"),
        (RuntimeError("no C compiler found\nTraceback"), "RuntimeError: no C compiler found"),
        (PreflightError("the run needs about 90.0 GiB", "a smaller microbatch"), "out of memory"),
    ],
)
@pytest.mark.slow
def test_a_failing_trial_leaves_the_others(monkeypatch: pytest.MonkeyPatch, error: Exception, failure: str) -> None:
    def speed(config: RunConfig) -> float:
        if config.microbatch == 2:
            raise error
        return 50.0

    measured_as(monkeypatch, speed)
    trials = tuned(8)
    assert {trial.failure for trial in trials if trial.settings["microbatch"] == "2"} == {failure}
    assert trials[0].tokens_per_s == 50.0


def test_the_same_failure_of_all_trials_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(_: RunConfig) -> float:
        raise RuntimeError("no C compiler found")

    measured_as(monkeypatch, speed)
    with pytest.raises(HardwareError, match="no C compiler found"):
        tuned(2)


def test_stopping_keeps_the_fastest_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def speed(config: RunConfig) -> float:
        if tried:
            assert yaml.safe_load(settings.read_text())["microbatch"] == tried[0].microbatch
        if len(tried) == 2:
            raise KeyboardInterrupt
        return 100.0 / (1 + len(tried))

    settings, tried = tmp_path / "fast.yaml", []
    seen = measured_as(monkeypatch, lambda config: (speed(config), tried.append(config))[0])
    assert main(["bench", "step", *TINY, "--tune", "--settings", str(settings)]) == 130
    printed = capsys.readouterr()
    assert len(seen) == 3
    assert "stopped after 2 trials" in printed.err
    next_line = printed.out.splitlines()[-1]
    # What is tuned replaces what was given.
    assert next_line.count("microbatch=") == 1
    assert f"microbatch={tried[0].microbatch}" in next_line


def test_a_run_from_given_weights_is_measured_in_their_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = load_config(None, ["model=llama-1b"]).config.model
    (tmp_path / "config.json").write_text(json.dumps(dict(hf_config_of(shape, "bfloat16"))))
    tried = measured_as(monkeypatch, lambda _: 1.0)
    words = [f"finetune.start_from={tmp_path}", "global_batch=2", "microbatch=1", "compute.device=cpu"]
    assert main(["bench", "step", *words, "model.seq_len=16", "--tune", "--trials", "1"]) == 0
    assert {(config.model.hidden, config.model.kv_heads) for config in tried} == {(2048, 8)}


def test_a_model_beyond_host_memory_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "model=llama-405b", "global_batch=1", "microbatch=1", "compute.device=cpu"]) == 3
    message = capsys.readouterr().err
    assert "GiB of host memory free, and the run needs about" in message
    # Nothing is saved, so there is no copy of the state for it.
    assert "a copy for saves" not in message


def test_settings_never_replace_the_runs_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("global_batch: 4\n")
    assert main(["bench", "step", str(run), "--tune", "--settings", str(run)]) == 2
    assert "would replace the run's own file" in capsys.readouterr().err
    assert run.read_text() == "global_batch: 4\n"


def test_more_settings_must_be_faster_than_noise() -> None:
    few, more = {"microbatch": "2"}, {"microbatch": "2", "compute.loss_chunks": "2"}
    assert fastest([Trial(more, 1, 1, 100.5), Trial(few, 1, 1, 100.0)]) == Trial(few, 1, 1, 100.0)
    assert fastest([Trial(few, 1, 1, 100.0), Trial(more, 1, 1, 105.0)]) == Trial(more, 1, 1, 105.0)
    assert fastest([Trial(few, 1, 1, failure="out of memory")]) is None


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        tuned(1)


def test_command_writes_settings_that_a_run_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, out = tmp_path / "fast.yaml", tmp_path / "trials.json"
    words = ["--steps", "1", "--trials", "1", "--settings", str(settings), "--out", str(out)]
    assert main(["bench", "step", *TINY, "--tune", *words]) == 0
    printed = capsys.readouterr()
    assert "trial 1: microbatch=" in printed.err
    assert printed.out.splitlines()[-1].startswith("next: keepstep train ")
    result = json.loads(out.read_text())
    written = yaml.safe_load(settings.read_text())
    assert str(written["microbatch"]) == result["settings"]["microbatch"]
    config = load_config(settings, TINY[:6]).config
    assert config.compute.recompute == result["settings"]["compute.recompute"]
    measured = [trial for trial in result["trials"] if trial["settings"] == result["settings"]]
    assert measured[0]["tokens_per_s"] > 0
