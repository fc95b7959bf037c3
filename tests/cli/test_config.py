"""`keepstep config` and `keepstep models` answer at once, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.patience import PATIENCE_S


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: mpt-125m\noptimizer:\n  lr: 6e-4\n")
    return "run.yaml"


def test_config_show_prints_each_value_with_its_origin(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", run_yaml, "seed=3", "--changed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed: 3               # command line" in lines
    assert "  lr: 0.0006          # run.yaml:3" in lines
    assert "  layers: 12          # preset mpt-125m" in lines
    assert len({line.index("#") for line in lines if "#" in line}) == 1


def test_config_show_changed_leaves_out_defaults(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", run_yaml, "seed=3", "--changed", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"]["value"] == 3
    assert not [path for path, told in shown.items() if told["origin"] == "default"]


def test_config_show_prints_json(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", run_yaml, "max_duration=2ep"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["max_duration"] == {"value": "2ep", "origin": "command line"}
    assert answer["optimizer.betas"] == {"value": [0.9, 0.95], "origin": "default"}


def test_config_check_lists_every_problem(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", run_yaml]) == 0
    captured = capsys.readouterr()
    assert captured.out == "sound: run run, model mpt-125m, settings given: 2\n"
    assert captured.err == "next: keepstep train run.yaml\n"
    assert main(["config", "check", run_yaml, "optimzer.lr=x", "parallel.tensro=2"]) == 2
    assert capsys.readouterr().err.count("error:") == 2
    assert main(["config", "check", "--json", run_yaml, "lr=1"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "sound": False,
        "problems": [{"problem": "command line: unknown key lr", "hint": "did you mean optimizer.lr?"}],
    }


def test_config_reference_and_schema_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration reference\n")
    assert main(["config", "reference", "optimizer"]) == 0
    assert "| `optimizer.lr` | number, above 0 | `0.0003` | Peak learning rate. |" in capsys.readouterr().out
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False


def test_models_lists_presets_with_exact_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["preset"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mpt-125m"]["parameters"] == 125_311_488
    assert rows["mpt-small-cpu"]["alias_of"] == "mpt-tiny"
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    assert "125,311,488  125M" in table
    assert [row["preset"] for row in rows.values() if row["misnamed"]] == ["gpt3-375m", "gpt3-857m"]
    assert table.count("M, not the size in its published name") == 2
    assert table.splitlines()[-1].startswith("next: ")


def _child(*words: str) -> tuple[int, float, float, str]:
    """Exit code, CPU seconds, wall seconds and stderr of one keepstep process."""
    command = [sys.executable, "-X", "importtime", "-m", "keepstep", *words]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stderr is not None
    with child.stderr:
        report = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_utime + usage.ru_stime, time.perf_counter() - begin, report


def _imported(report: str) -> set[str]:
    lines = [line for line in report.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


HEAVY = {"torch", "numpy", "transformers", "matplotlib", "tensorboard"}


@pytest.mark.slow
def test_help_is_quick_and_imports_no_torch() -> None:
    for _ in range(10):
        code, cpu_s, _, report = _child("--help")
        if cpu_s < 0.3:
            break
    assert code == 0
    assert _imported(report) & HEAVY == set()
    assert cpu_s < 0.3


@pytest.mark.slow
def test_train_reports_two_mistakes_within_a_second(run_yaml: str) -> None:
    # Neighbours can take a machine's cores away for a minute.
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        code, cpu_s, wall_s, report = _child("train", run_yaml, "optimzer.lr=x", "parallel.tensro=2")
        if cpu_s < 0.5 and wall_s < 1:
            break
    assert code == 2
    assert "did you mean optimizer.lr?" in report
    assert "did you mean parallel.tensor?" in report
    assert _imported(report) & HEAVY == set()
    assert cpu_s < 0.5
    assert wall_s < 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [["models"], ["config", "show"], ["config", "schema"], ["config", "reference"]])
def test_config_and_models_import_no_torch(words: list[str]) -> None:
    code, _, _, report = _child(*words)
    assert code == 0
    assert _imported(report) & HEAVY == set()
