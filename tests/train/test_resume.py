"""Stopping, being started again, and doing things by the clock: what several processes must decide alike."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.core.errors import StopRequested
from keepstep.interop.full_model import load_full_model
from keepstep.resilience.fault_injection import Fault, to_environment
from keepstep.train import evaluation
from tests.train.tiny_runs import losses, metrics, run_here, run_processes
from tests.train.tiny_worlds import run_world

pytestmark = pytest.mark.slow


def events(root: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (root / name / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("mode", ["reproducible=resume", "reproducible=elastic"])
def test_clocks_that_differ_save_at_the_same_step(tmp_path: Path, mode: str) -> None:
    """Nobody's clocks agree to the microsecond: a save every half hour must not leave one process behind."""
    words = ["checkpoint.interval=4s", "schedule.name=constant", "schedule.warmup=0ba", "max_duration=20s", mode]
    assert run_world(tmp_path, 2, *words, ticks_s=[0.5, 0.8]) == [0, 0], (tmp_path / "said_0.txt").read_text()
    last = max(line["step"] for line in metrics(tmp_path))
    saved = [event["step"] for event in events(tmp_path, "run", "checkpoint_committed")]
    assert len(saved) >= 4
    assert saved[-1] == last


def saved(root: Path, name: str) -> list[str]:
    return sorted(folder.name for folder in (root / name / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("weights_only", [False, True])
def test_run_with_resume_from_resumes_its_own_steps(tmp_path: Path, weights_only: bool) -> None:
    """Schedulers start the same command again: that must not throw away what was trained since."""
    run_here(tmp_path, "name=base", "max_duration=4ba")
    begin = [f"checkpoint.resume_from={tmp_path}/base/checkpoints/step_00000004", "max_duration=12ba"]
    begin += [f"checkpoint.skip_optimizer={str(weights_only).lower()}", "checkpoint.interval=5ba"]
    run_here(tmp_path, "name=whole", *begin)
    run_here(tmp_path, "name=cut", *begin, "checkpoint.at_end=false")
    assert saved(tmp_path, "cut")[-1] == "step_00000010"
    run_here(tmp_path, "name=cut", *begin)
    assert [event["step"] for event in events(tmp_path, "cut", "resume")][-1] == 10
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")

    run_here(tmp_path, "name=cut", *begin, "checkpoint.autoresume=false")
    resumed = [event["step"] for event in events(tmp_path, "cut", "resume")]
    assert resumed == ([10] if weights_only else [4, 10, 4])


@pytest.mark.parametrize("snapshot_interval", [0, 1])
@pytest.mark.parametrize("begins_at", ["a seed", "a step"])
def test_restart_resumes_without_autoresume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_interval: int, begins_at: str
) -> None:
    """Without `autoresume` a process that dies must not cost the run all that it has done so far."""
    words = ["max_duration=12ba", "checkpoint.interval=4ba", "checkpoint.keep=0", "checkpoint.autoresume=false"]
    words += ["checkpoint.asynchronous=false", f"resilience.snapshot_interval={snapshot_interval}"]
    if begins_at == "a step":
        run_here(tmp_path, "name=base", "max_duration=2ba")
        words.append(f"checkpoint.resume_from={tmp_path}/base/checkpoints/step_00000002")
    # The earlier command's steps are further on, and none of this one's business.
    undisturbed = run_processes(tmp_path, 2, *words)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = losses(tmp_path)
    before = len(events(tmp_path, "run", "resume"))

    for name, value in to_environment([Fault("kill", 3, 1), Fault("kill", 9, 1)], tmp_path).items():
        monkeypatch.setenv(name, value)
    done = run_processes(tmp_path, 2, *words)
    assert done.returncode == 0, done.stderr
    resumed = [event["step"] for event in events(tmp_path, "run", "resume")][before:]
    assert resumed[-1] == 8
    assert all(step < 4 for step in resumed[:-1]), "the first fault came before this command's first save"
    assert losses(tmp_path) == expected


def test_resume_refuses_settings_that_do_not_fit(tmp_path: Path) -> None:
    """A second command of the same name with another shape must not cost the first one its model."""
    run_here(tmp_path, "max_duration=2ba")
    folder = tmp_path / "run"
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "facts.json")}
    refused = run_processes(tmp_path, 2, "model.hidden=64", "max_duration=4ba")
    assert refused.returncode == 2
    assert "this run needs" in refused.stderr
    assert "give this run another name (and another checkpoint.folder, if you set one)" in refused.stderr
    assert "given up" not in refused.stderr
    assert "Traceback" not in refused.stderr
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert load_full_model(folder)[2] == 2
    run_here(tmp_path, "max_duration=4ba")
    assert len(losses(tmp_path)) == 4


def test_a_manifest_is_json_that_every_reader_knows(tmp_path: Path) -> None:
    """From the first step on, when no validation has been yet; other tools read manifests too."""
    words = ["max_duration=4ba", "evaluate.at_end=false", "evaluate.patience=2"]
    run_here(tmp_path, *words)
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("step_*/manifest-*.json")
    assert json.loads(manifest.read_text(), parse_constant=pytest.fail)["values"]["best"]["lowest"] is None
    run_here(tmp_path, *words, "max_duration=6ba")
    assert len(losses(tmp_path)) == 6


def test_finished_run_says_that_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for duration, told in (("2ba", False), ("2ba", True), ("4ba", False), ("3ba", True)):
        run_here(tmp_path, f"max_duration={duration}", "optimizer.lr=2e-2")
        assert ("nothing is left to train" in capsys.readouterr().err) is told
    assert len(losses(tmp_path)) == 4


def test_steps_of_another_seed_or_run_are_not_resumed_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"checkpoint.folder={tmp_path}/run/checkpoints"
    run_here(tmp_path, "max_duration=2ba")
    run_here(tmp_path, "max_duration=3ba")
    assert "notice: seed" not in capsys.readouterr().err
    run_here(tmp_path, "max_duration=4ba", "seed=3")
    assert "notice: seed is 3, but the steps up to 3 are of a run with seed=17;" in capsys.readouterr().err
    run_here(tmp_path, "max_duration=5ba", "seed=3", "name=other", folder)
    error = capsys.readouterr().err
    assert "notice: name is other, but the steps up to 4 are of a run with name=run; to start a new run, use" in error
    assert "notice: seed" not in error
    run_here(tmp_path, "name=third", f"checkpoint.resume_from={tmp_path}/run/checkpoints/step_00000005")
    assert "but the steps" not in capsys.readouterr().err, "these steps were asked for"


def test_resume_from_holds_until_the_run_has_own_steps(tmp_path: Path) -> None:
    run_here(tmp_path, "max_duration=8ba", "checkpoint.interval=2ba", "checkpoint.keep=0")
    back = [f"checkpoint.resume_from={tmp_path}/run/checkpoints/step_00000002", "checkpoint.keep=0"]
    run_here(tmp_path, *back, "max_duration=4ba")
    run_here(tmp_path, *back, "max_duration=5ba")
    run_here(tmp_path, "checkpoint.keep=0", "max_duration=6ba")
    assert [event["step"] for event in events(tmp_path, "run", "resume")] == [2, 4, 5]


def test_finished_run_keeps_its_checkpoints(tmp_path: Path) -> None:
    words = ["max_duration=6ba", "checkpoint.interval=2ba", "checkpoint.keep=2"]
    run_here(tmp_path, *words)
    before = saved(tmp_path, "run")
    run_here(tmp_path, *words)
    assert saved(tmp_path, "run") == before == ["step_00000004", "step_00000006"]


def test_stop_waits_for_the_save_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Saved" must be true when it is printed."""
    started, waited_for = [], []
    save_async, save = Checkpointer.save_async, Checkpointer.save

    def start(self: Checkpointer, step: int, *rest: Any) -> None:
        started.append(step)
        save_async(self, step, *rest)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpointer, "save_async", start)
    monkeypatch.setattr(
        Checkpointer, "save", lambda self, step, *rest: (waited_for.append(step), save(self, step, *rest))
    )
    # A busy machine may take more than a second for a step, and would leave it instead of finishing it.
    monkeypatch.setattr("keepstep.train.steps_in_flight.SHORT_STEP_S", 1000.0)
    with pytest.raises(StopRequested, match="after step 4, saved"):
        run_here(tmp_path, "checkpoint.interval=1ba", "max_duration=8ba")
    assert (started, waited_for) == ([1, 2, 3], [4])


@pytest.mark.parametrize(
    ("processes", "mode"),
    [
        (1, "model.dropout=0.1"),
        (2, "model.dropout=0.1"),
        (2, "reproducible=elastic"),
        (2, "optimizer=muon"),
        (2, "checkpoint.interval=3ba"),
        (2, "max_duration=4ba"),
    ],
)
def test_stop_while_waiting_for_data_costs_no_step(tmp_path: Path, processes: int, mode: str) -> None:
    """Storage that is away is when people and schedulers stop runs: what was trained until then must be saved."""
    assert run_world(tmp_path, processes, mode, "name=whole") == [0] * processes
    codes = run_world(tmp_path, processes, mode, "name=cut", stuck_on=processes - 1)
    assert codes == [75] * processes, (tmp_path / "said_0.txt").read_text()
    assert saved(tmp_path, "cut") == ["step_00000003"]
    assert "after step 3, saved" in (tmp_path / "said_0.txt").read_text()
    assert events(tmp_path, "cut", "stop")
    assert run_world(tmp_path, processes, mode, "name=cut") == [0] * processes
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    assert [event["step"] for event in events(tmp_path, "cut", "resume")] == [3]


def validated(root: Path, name: str) -> dict[int, float]:
    return {line["step"]: line["valid_loss"] for line in metrics(root, name) if "valid_loss" in line}


def test_patience_survives_stops(tmp_path: Path) -> None:
    """Started again every few minutes, a run must not wait for ever for what it was to wait for three times."""
    words = ["schedule.name=constant", "optimizer.lr=1e-9", "evaluate.interval=2ba", "evaluate.patience=3"]
    words += ["evaluate.at_end=false", "checkpoint.interval=2ba"]
    run_here(tmp_path, *words, "name=whole", "max_duration=40ba")
    last = max(validated(tmp_path, "whole"))
    assert last < 40
    for stop in range(2, last + 4, 2):
        run_here(tmp_path, *words, "name=cut", f"max_duration={stop}ba")
    assert validated(tmp_path, "cut") == validated(tmp_path, "whole")
    run_here(tmp_path, *words, "name=cut", "max_duration=40ba")
    assert max(line["step"] for line in metrics(tmp_path, "cut")) == last, "it has seen enough, and stays so"


def test_patience_counts_a_step_evaluated_twice_once(tmp_path: Path) -> None:
    """A longer max_duration goes on from the last step, judged before it was saved: it is no worse than it was."""
    words = ["schedule.name=constant", "evaluate.interval=2ba", "evaluate.patience=1", "checkpoint.interval=0ba"]
    run_here(tmp_path, *words, "max_duration=4ba")
    found = validated(tmp_path, "run")
    assert found[4] < found[2], "it improves: there is no reason to stop"
    run_here(tmp_path, *words, "max_duration=6ba")
    assert len(losses(tmp_path)) == 6


@pytest.mark.parametrize("checkpoint_interval", ["0ba", "2ba"])
@pytest.mark.parametrize("step", [2, 5])
def test_resume_does_the_validation_that_a_stop_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, checkpoint_interval: str
) -> None:
    """The last one too: a run that was asked to stop before it knew its result is not done."""
    words = ["max_duration=5ba", "evaluate.interval=2ba", "evaluate.keep_best=true"]
    words.append(f"checkpoint.interval={checkpoint_interval}")
    run_here(tmp_path, *words, "name=whole")
    real, reached = evaluation.validate, iter([2, 4, 5])

    def asked_to_stop_in_one(*parts: Any) -> Any:
        if next(reached) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*parts)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "validate", asked_to_stop_in_one)
        with pytest.raises(StopRequested, match=f"after step {step}, saved"):
            run_here(tmp_path, *words, "name=cut")
    assert saved(tmp_path, "cut")[-1] == f"step_{step:08d}"
    assert events(tmp_path, "cut", "stop")
    run_here(tmp_path, *words, "name=cut")
    assert validated(tmp_path, "cut") == validated(tmp_path, "whole")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    assert saved(tmp_path, "cut")[-1] == "step_00000005"


def test_best_weights_that_fail_to_save_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").write_text("in the way")
    run_here(tmp_path, "evaluate.keep_best=true", "evaluate.interval=3ba")
    assert len(losses(tmp_path)) == 6
    assert [event["reason"] for event in events(tmp_path, "run", "warning")] == ["best_failed"] * 2


def test_resume_with_larger_batches_sees_all_samples(tmp_path: Path) -> None:
    words = ["max_duration=128sp", "checkpoint.interval=8ba"]
    run_here(tmp_path, *words, "checkpoint.at_end=false", "schedule.name=linear")
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*16"):
        folder.rename(tmp_path / folder.name)
    run_here(tmp_path, *words, "global_batch=16", "schedule.name=linear")
    last = [line for line in metrics(tmp_path) if "loss" in line][-1]
    assert (last["step"], last["samples"]) == (12, 128)
    assert last["lr"] < 0.3e-2, "near the end of its schedule"


def test_changed_learning_rate_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "max_duration=2ba", "optimizer.lr=0.01")
    run_here(tmp_path, "max_duration=3ba", "optimizer.lr=0.01")
    assert "notice: optimizer.lr" not in capsys.readouterr().err
    run_here(tmp_path, "max_duration=4ba", "optimizer.lr=0.02")
    told = "notice: optimizer.lr is 0.02 from here on; the steps up to 3 had 0.01, and optimizer.lr=0.01 keeps that"
    assert told in capsys.readouterr().err
