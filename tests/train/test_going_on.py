"""Stopping, being started again, and doing things by the clock: what several processes must decide alike."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import losses, metrics, run_here, run_processes
from tiny_worlds import run_world

from keepstep.core.errors import StopRequested
from keepstep.resilience.chaos import Fault, to_environment
from keepstep.resilience.signals import StopFlag
from keepstep.train import run as assembly
from keepstep.train.saver import Saver
from keepstep.train.start import whole_model

pytestmark = pytest.mark.slow


def events(root: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (root / name / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("mode", ["reproducible=resume", "reproducible=elastic"])
def test_processes_whose_clocks_differ_save_and_end_at_the_same_step(tmp_path: Path, mode: str) -> None:
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
def test_a_run_that_began_at_another_ones_step_goes_on_from_its_own(tmp_path: Path, weights_only: bool) -> None:
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
def test_a_restart_goes_on_where_the_run_was_though_a_new_command_would_begin_anew(
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


def test_settings_that_do_not_fit_a_runs_steps_are_refused_at_once_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
    """A second command of the same name with another shape must not cost the first one its model."""
    run_here(tmp_path, "max_duration=2ba")
    folder = tmp_path / "run"
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "facts.json")}
    refused = run_processes(tmp_path, 2, "model.hidden=64", "max_duration=4ba")
    assert refused.returncode == 2
    assert "this run needs" in refused.stderr
    assert "give this run another name" in refused.stderr
    assert "given up" not in refused.stderr
    assert "Traceback" not in refused.stderr
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert whole_model(folder)[2] == 2
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


def test_a_run_that_is_done_already_says_that_it_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for duration, told in (("2ba", False), ("2ba", True), ("4ba", False), ("3ba", True)):
        run_here(tmp_path, f"max_duration={duration}", "optimizer.lr=2e-2")
        assert ("nothing is left to train" in capsys.readouterr().err) is told
    assert len(losses(tmp_path)) == 4


def test_going_back_in_a_run_holds_until_it_has_steps_of_its_own_since(tmp_path: Path) -> None:
    run_here(tmp_path, "max_duration=8ba", "checkpoint.interval=2ba", "checkpoint.keep=0")
    back = [f"checkpoint.resume_from={tmp_path}/run/checkpoints/step_00000002", "checkpoint.keep=0"]
    run_here(tmp_path, *back, "max_duration=4ba")
    run_here(tmp_path, *back, "max_duration=5ba")
    run_here(tmp_path, "checkpoint.keep=0", "max_duration=6ba")
    assert [event["step"] for event in events(tmp_path, "run", "resume")] == [2, 4, 5]


def test_a_finished_run_that_is_started_again_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    words = ["max_duration=6ba", "checkpoint.interval=2ba", "checkpoint.keep=2"]
    run_here(tmp_path, *words)
    before = saved(tmp_path, "run")
    run_here(tmp_path, *words)
    assert saved(tmp_path, "run") == before == ["step_00000004", "step_00000006"]


def test_a_stop_that_is_read_with_the_step_of_a_save_waits_for_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Saved" must be true when it is said."""
    durable: list[bool] = []
    real = Saver.save
    monkeypatch.setattr(Saver, "save", lambda *words: (durable.append(words[-1]), real(*words)))
    # Every step is saved, so each step's own numbers are read just before: the second one tells of the request.
    looks = iter(range(1, 100))
    monkeypatch.setattr(StopFlag, "requested", property(lambda flag: next(looks) >= 2))
    with pytest.raises(StopRequested, match="after step 2, saved"):
        run_here(tmp_path, "checkpoint.interval=1ba", "max_duration=4ba")
    assert durable == [False, True]


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
def test_a_stop_while_a_process_waits_for_data_costs_no_step(tmp_path: Path, processes: int, mode: str) -> None:
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


def test_patience_is_the_same_for_a_run_that_was_stopped(tmp_path: Path) -> None:
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


def test_a_step_that_is_evaluated_again_when_a_run_goes_on_counts_once(tmp_path: Path) -> None:
    """A longer max_duration goes on from the last step, judged before it was saved: it is no worse than it was."""
    words = ["schedule.name=constant", "evaluate.interval=2ba", "evaluate.patience=1", "checkpoint.interval=0ba"]
    run_here(tmp_path, *words, "max_duration=4ba")
    found = validated(tmp_path, "run")
    assert found[4] < found[2], "it improves: there is no reason to stop"
    run_here(tmp_path, *words, "max_duration=6ba")
    assert len(losses(tmp_path)) == 6


@pytest.mark.parametrize("checkpoint_interval", ["0ba", "2ba"])
@pytest.mark.parametrize("step", [2, 5])
def test_a_validation_that_a_stop_cut_off_is_done_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, checkpoint_interval: str
) -> None:
    """The last one too: a run that was asked to stop before it knew its result is not done."""
    words = ["max_duration=5ba", "evaluate.interval=2ba", "evaluate.keep_best=true"]
    words.append(f"checkpoint.interval={checkpoint_interval}")
    run_here(tmp_path, *words, "name=whole")
    real, reached = assembly.validate, iter([2, 4, 5])

    def asked_to_stop_in_one(*parts: Any) -> Any:
        if next(reached) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*parts)

    with monkeypatch.context() as patched:
        patched.setattr(assembly, "validate", asked_to_stop_in_one)
        with pytest.raises(StopRequested, match=f"after step {step}, saved"):
            run_here(tmp_path, *words, "name=cut")
    assert saved(tmp_path, "cut")[-1] == f"step_{step:08d}"
    assert events(tmp_path, "cut", "stop")
    run_here(tmp_path, *words, "name=cut")
    assert validated(tmp_path, "cut") == validated(tmp_path, "whole")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    assert saved(tmp_path, "cut")[-1] == "step_00000005"


def test_best_weights_that_cannot_be_kept_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").write_text("in the way")
    run_here(tmp_path, "evaluate.keep_best=true", "evaluate.interval=3ba")
    assert len(losses(tmp_path)) == 6
    assert [event["reason"] for event in events(tmp_path, "run", "warning")] == ["best_failed"] * 2


def test_a_run_that_goes_on_with_larger_batches_still_sees_all_it_was_to_see(tmp_path: Path) -> None:
    words = ["max_duration=128sp", "checkpoint.interval=8ba"]
    run_here(tmp_path, *words, "checkpoint.at_end=false", "schedule.name=linear")
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*16"):
        folder.rename(tmp_path / folder.name)
    run_here(tmp_path, *words, "global_batch=16", "schedule.name=linear")
    last = [line for line in metrics(tmp_path) if "loss" in line][-1]
    assert (last["step"], last["samples"]) == (12, 128)
    assert last["lr"] < 0.3e-2, "near the end of its schedule"
