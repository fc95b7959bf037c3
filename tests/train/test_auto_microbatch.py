"""`microbatch: auto` in real runs: chosen once, the same everywhere, and kept over restarts."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.core.errors import HardwareError
from keepstep.observe.run_folder import RunFolder
from keepstep.resilience.fault_injection import Fault, to_environment
from keepstep.train import device
from keepstep.train.step import TrainStep
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import TINY, BackgroundRun, losses, run_here
from tests.train.tiny_worlds import run_world


def stored_rows(root: Path, name: str = "run") -> int:
    return load_config(RunFolder(root / name).config).config.microbatch


def test_run_chooses_says_and_stores_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "microbatch=auto", "global_batch=12")
    # Of 1, 2, 3, 4, 6 and 12 the largest below the limit of CPUs.
    assert stored_rows(tmp_path) == 6
    assert "microbatch auto: 6 rows per forward pass (" in capsys.readouterr().err
    run_here(tmp_path, "microbatch=6", "global_batch=12", "name=given")
    assert losses(tmp_path) == losses(tmp_path, "given")


@pytest.mark.slow
def test_resume_keeps_the_rows_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "microbatch=2", "name=whole")
    run_here(tmp_path, "microbatch=2", "max_duration=3ba")
    run_here(tmp_path, "microbatch=auto")
    assert stored_rows(tmp_path) == 2  # a new run would choose 8
    assert losses(tmp_path) == losses(tmp_path, "whole")
    said = capsys.readouterr().err
    assert "microbatch auto: 2 rows per forward pass" in said
    assert "kept from" in said
    assert "notice: microbatch" not in said


def test_resume_with_another_number_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "microbatch=auto", "max_duration=3ba")
    run_here(tmp_path, "microbatch=4")
    assert stored_rows(tmp_path) == 4
    assert "notice: microbatch is 4 from here on; the steps up to 3 had 8" in capsys.readouterr().err


def test_another_model_of_the_same_name_chooses_again(tmp_path: Path) -> None:
    run_here(tmp_path, "microbatch=2", "max_duration=1ba", "checkpoint.at_end=false")
    run_here(tmp_path, "microbatch=auto", "max_duration=1ba", "model.hidden=64")
    assert stored_rows(tmp_path) == 8


@pytest.mark.slow
def test_killed_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    words = ["microbatch=auto", "checkpoint.interval=2ba"]
    faults = to_environment([Fault("kill", 3, rank=1)], marks)
    run = BackgroundRun(tmp_path, 2, *words, output=tmp_path / "said", environment=faults)
    assert run.end() == 0, run.output
    assert run.output.count("microbatch auto: 4 rows per forward pass") == 2
    assert len(list(marks.iterdir())) == 1
    assert run_world(tmp_path, 2, "microbatch=4", "name=whole") == [0, 0]
    assert losses(tmp_path) == losses(tmp_path, "whole")


@pytest.mark.slow
def test_other_processes_choose_again_where_the_rows_do_not_suit(tmp_path: Path) -> None:
    run_here(tmp_path, "microbatch=auto", "max_duration=3ba")
    assert stored_rows(tmp_path) == 8
    assert run_world(tmp_path, 2, "microbatch=auto") == [0, 0]
    assert stored_rows(tmp_path) == 4
    said = (tmp_path / "said_0.txt").read_text()
    assert "it was 8, which does not suit 2 processes" in said
    assert "notice: microbatch is 4 from here on; the steps up to 3 had 8" in said


@pytest.mark.slow
def test_elastic_run_keeps_its_rows_on_any_number_of_processes(tmp_path: Path) -> None:
    words = ["reproducible=elastic", "global_batch=16"]
    run_here(tmp_path, *words, "microbatch=8", "name=whole")
    run_here(tmp_path, *words, "microbatch=auto", "max_duration=3ba")
    assert run_world(tmp_path, 2, *words, "microbatch=auto") == [0, 0]
    assert stored_rows(tmp_path) == 8
    assert losses(tmp_path) == losses(tmp_path, "whole")


def _settle(rank: int, store: Path, folders: list[Path | None], planned: list[int], answers: Any) -> None:
    """Settle in one of two processes whose devices differ."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    plan = device.microbatch_on

    def plans_differently(config: Any, *rest: Any) -> Any:
        return plan(config, *rest) if config.microbatch else (SimpleNamespace(microbatch=planned[rank]), 1.0)

    device.microbatch_on = plans_differently
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = load_config(None, [*TINY, "microbatch=auto"]).config
    answers.put(device.settle_auto(config, folders[rank])[0].microbatch)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "agreed"), [(0, 2), (1, 1)])
def test_processes_that_plan_differently_agree(tmp_path: Path, kept: int, agreed: int) -> None:
    """The smallest plan counts; a number that only one of them finds in the run's folder counts more."""
    folders: list[Path | None] = [None, None]
    if kept:
        run_here(tmp_path, f"microbatch={kept}", "max_duration=1ba")
        folders[0] = RunFolder(tmp_path / "run").config
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [
        context.Process(target=_settle, args=(rank, tmp_path / "store", folders, [4, 2], answers)) for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=PATIENCE_S) for _ in workers] == [agreed, agreed]
    for worker in workers:
        worker.join(PATIENCE_S)


def test_out_of_memory_names_the_next_smaller_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TrainStep, "run", fails)
    with pytest.raises(HardwareError) as found:
        run_here(tmp_path, "microbatch=auto", "global_batch=12")
    assert str(found.value.hint).startswith("set microbatch=4, set compute.recompute=full")
    with pytest.raises(HardwareError) as found:
        run_here(tmp_path, "microbatch=1", "name=one")
    assert "microbatch" not in str(found.value.hint)


def test_bench_step_measures_what_auto_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *TINY, "microbatch=auto", "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["microbatch"] == 8
