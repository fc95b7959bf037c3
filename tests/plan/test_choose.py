"""Degrees, micro batch and global batch that nobody gave are chosen, named, and accepted by training."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.config.presets import PRESETS

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.slow
def test_plan_chooses_a_layout_that_fits_for_every_preset(preset: str, capsys: Captured) -> None:
    # FSDP gathers whole blocks, and two of its 11 billion parameters each need larger GPUs.
    cluster = "h200:512" if preset == "deepseek-v3" else "azure-nd-h100-v5:64"
    started_s = time.process_time()
    assert main(["plan", f"model={preset}", "--cluster", cluster, "--json"]) == 0
    # Two seconds at most on an idle machine.
    assert time.process_time() - started_s < 30
    answer = json.loads(capsys.readouterr().out)
    assert answer["memory"]["fits"]
    config = load_config(None, [f"model={preset}", *answer["chosen"]]).config
    assert vars(check_layout(config, 512)).items() <= answer["layout"].items()


def test_plan_shards_experts_by_data_parallelism(capsys: Captured) -> None:
    assert main(["plan", "model=qwen3-30b-a3b", "--cluster", "azure-nd-h100-v5:8"]) == 0
    said = capsys.readouterr().out
    assert "30.5B parameters (3.35B active)" in said
    assert "layout    shard 64;" in said
    assert "verdict: fits" in said


def test_plan_knows_expert_parallelism(capsys: Captured) -> None:
    words = ["plan", "model=qwen3-30b-a3b", "--cluster", "azure-nd-h100-v5:8", "--json"]
    answers = []
    for given in ("parallel.expert=1", "parallel.expert=8"):
        assert main([*words, given, "microbatch=2", "global_batch=256"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    whole, divided = answers
    assert divided["layout"]["expert"] == 8
    # A process gathers an eighth of the experts, and tokens travel.
    assert divided["memory"]["parts_gib"]["buffers"] < whole["memory"]["parts_gib"]["buffers"]
    assert divided["speed"]["exposed_s"]["expert"] > 0


def test_plan_chooses_for_thousands_of_machines(capsys: Captured) -> None:
    assert main(["plan", "model=llama-405b", "--cluster", "azure-nd-h100-v5:2048"]) == 0
    out = capsys.readouterr().out
    assert "(not given: the fastest that fits)" in out
    # What the last line proposes is a run that training accepts on these machines.
    words = out.splitlines()[-1].removeprefix("next: keepstep train ").split()
    assert check_layout(load_config(None, words).config, 16384).world_size == 16384


def test_plan_keeps_what_was_given(capsys: Captured) -> None:
    given = ["parallel.tensor=8", "microbatch=8", "global_batch=1024", "parallel.replicate=4"]
    assert main(["plan", "model=gpt3-175b", *given, "--cluster", "azure-nd-h100-v5:64", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    layout = answer["layout"]
    assert (layout["tensor"], layout["microbatch"], layout["replicate"]) == (8, 8, 4)
    assert answer["speed"]["tokens_per_step"] == 1024 * 2048
    assert not {word.partition("=")[0] for word in answer["chosen"]} & {word.partition("=")[0] for word in given}


def test_plan_leaves_defaults_that_fit_alone(capsys: Captured) -> None:
    assert main(["plan", "model=mpt-125m", "--cluster", "h100:8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == []


def test_plan_says_why_no_layout_fits(capsys: Captured) -> None:
    assert main(["plan", "model=llama-405b", "--cluster", "h100:2"]) == 3
    out = capsys.readouterr().out
    assert "no layout fits; this one needs little memory" in out
    assert "verdict: does not fit, needs 3" in out


def test_plan_of_a_given_batch_names_the_remedy(capsys: Captured) -> None:
    words = ["model=gpt3-175b", "global_batch=24", "parallel.tensor=1", "parallel.pipeline=1"]
    assert main(["plan", *words, "--cluster", "azure-nd-h100-v5:64"]) == 2
    error = capsys.readouterr().err
    assert "global_batch is 24, but it must be a multiple of microbatch" in error
    assert "leave it out to have it chosen" in error


@pytest.mark.slow
def test_search_works_where_nobody_gave_a_batch(capsys: Captured) -> None:
    words = ["model=mpt-125m", "--cluster", "h100:12", "--search", "--top", "1"]
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["search"]["best"][0]["fits"]


@pytest.fixture
def new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> str:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "first"]) == 0
    capsys.readouterr()
    return "first/run.yaml"


@pytest.mark.parametrize("where", ["slurm:azure-h100", "k8s:aks-h100"])
def test_submitted_new_run_gets_a_batch_for_its_nodes(new_run: str, where: str, capsys: Captured) -> None:
    assert main(["train", new_run, "--on", where, "-N", "8", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert main(["plan", new_run, "--cluster", "azure-nd-h100-v5:8", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert f"chosen: {' '.join(chosen)}  (not given; for 8 × 8 processes)" in captured.err
    assert "global_batch=512" in chosen
    assert "global_batch=512" in captured.out


def test_submitted_run_keeps_a_given_batch(new_run: str, capsys: Captured) -> None:
    words = ["global_batch=32", "parallel.tensor=1"]
    assert main(["train", new_run, *words, "--on", "slurm:azure-h100", "-N", "8", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "global_batch is 32" in error
    assert "global_batch=64" in error


def test_submitted_batch_suits_every_number_of_nodes(new_run: str, capsys: Captured) -> None:
    Path("three.yaml").write_text("{nodes: 3, min_nodes: 2, gpus_per_node: 8}")
    assert main(["train", new_run, "--on", "slurm:three.yaml", "--dry-run"]) == 0
    assert "chosen: global_batch=48  (not given; for 2 to 3 × 8 processes)" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["slurm:azure-h100", "k8s:aks-h100"])
@pytest.mark.slow
def test_submitted_large_model_gets_degrees_that_fit(where: str, tmp_path: Path, capsys: Captured) -> None:
    command = ["train", "model=gpt3-175b", "data=demo", f"runs_dir={tmp_path}", "--on", where, "-N", "64", "--dry-run"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert main(["plan", "model=gpt3-175b", "--cluster", "azure-nd-h100-v5:64", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert any(word.startswith("parallel.tensor=") for word in chosen)
    assert f"chosen: {' '.join(chosen)}  (not given" in captured.err
    assert all(word in captured.out for word in chosen)


@pytest.mark.slow
def test_submitted_run_keeps_given_degrees(tmp_path: Path, capsys: Captured) -> None:
    given = ["model=llama-70b", "parallel.tensor=4", "global_batch=8", "data=demo", f"runs_dir={tmp_path}"]
    assert main(["train", *given, "--on", "slurm:azure-h100", "-N", "8", "--dry-run"]) == 0
    chosen = capsys.readouterr().err.splitlines()[0]
    assert chosen.startswith("chosen: ")
    assert "parallel.tensor" not in chosen


@pytest.mark.slow
def test_submitted_run_that_cannot_fit_is_warned_about(tmp_path: Path, capsys: Captured) -> None:
    given = ["model=llama-405b", "data=demo", f"runs_dir={tmp_path}"]
    assert main(["train", *given, "--on", "slurm:azure-h100", "-N", "1", "--dry-run"]) == 0
    error = capsys.readouterr().err
    assert error.startswith("warning: the run needs about ")
    assert "--cluster azure-nd-h100-v5:1 names what fits" in error


@pytest.mark.parametrize("nodes", [1, 3, 5, 8])
def test_submitted_finetune_gets_a_batch_near_its_own(nodes: int, tmp_path: Path, capsys: Captured) -> None:
    words = ["finetune", "model=llama-8b", "--data", "toolcalls", f"runs_dir={tmp_path}", "--dry-run"]
    where = ["--on", "slurm:azure-h100", "-N", str(nodes)]
    assert main([*words, *where]) == 0
    batch = re.findall(r"global_batch=(\d+)", capsys.readouterr().out)[-1]
    assert int(batch) % (8 * nodes) == 0
    assert 32 <= int(batch) <= 64


def test_submitted_finetune_keeps_a_given_batch(tmp_path: Path, capsys: Captured) -> None:
    words = ["finetune", "model=llama-8b", "global_batch=32", "--data", "toolcalls", f"runs_dir={tmp_path}"]
    assert main([*words, "--on", "slurm:azure-h100", "-N", "3", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "error: global_batch is 32, but it must be a multiple" in error
    assert "or leave it out to have it chosen" in error


def test_profile_with_an_unknown_cluster_is_refused(new_run: str, capsys: Captured) -> None:
    Path("mine.yaml").write_text("cluster: azure-nd-h100")
    assert main(["train", new_run, "--on", "slurm:mine.yaml", "--dry-run"]) == 2
    assert " hint: did you mean azure-nd-h100-v5?" in capsys.readouterr().err
