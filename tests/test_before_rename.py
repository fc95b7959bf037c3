"""What an earlier version wrote loads unchanged: a config, data sets, run folders and checkpoints.

tests/fixtures/make_before_rename.py wrote the files with the code of commit b3a1326, which had other names inside.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli.main import main
from tests.patience import PATIENCE_S

FIXTURE = Path(__file__).parent / "fixtures" / "before_rename"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
LORA = ["name=lora", "data.path=mds", "finetune.start_from=runs/base", "lora.rank=2", "lora.targets=[q, v]"]
LORA += ["evaluate.interval=0ba", "microbatch=4"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in."""
    shutil.copytree(FIXTURE, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", ["run.yaml", "runs/base/config.yaml"])
def test_old_config_is_shown_with_current_names(folder: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "config", "show", path)
    assert shown["compute.fused_matmuls"]["value"] is False
    assert shown["model.hidden"]["value"] == 16
    assert shown["max_duration"]["value"] == "4ba"


@pytest.mark.parametrize(("path", "documents", "tokens"), [("text", 60, 805), ("mds", 24, 792)])
def test_old_data_set_is_read_and_verified(
    folder: Path, path: str, documents: int, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "verify", path]) == 0
    capsys.readouterr()
    facts = answer(capsys, "data", "inspect", path)
    assert (facts["documents"], facts["tokens"]) == (documents, tokens)
    assert "line 0: the 0 foxes jump over 0 dogs" in json.dumps(facts)


@pytest.mark.parametrize(("run", "step"), [("base", 4), ("lora", 3)])
def test_old_checkpoint_is_listed_and_verified(
    folder: Path, run: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = answer(capsys, "ckpt", "ls", f"runs/{run}")
    assert [found["step"] for found in listed["steps"]] == [step]
    assert answer(capsys, "ckpt", "verify", f"runs/{run}")["steps"] == {f"step_{step:08}": []}


def test_old_runs_are_listed_as_finished(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {run["name"]: run for run in answer(capsys, "runs", "runs")}
    assert {name: run["state"] for name, run in runs.items()} == {"base": "finished", "lora": "finished"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "steps", "processes"), [("base", [], 7, 2), ("lora", LORA, 6, 1)])
def test_old_run_resumes_with_the_losses_of_the_old_code(
    folder: Path, name: str, words: list[str], steps: int, processes: int
) -> None:
    command = ["train", "run.yaml", *words, f"max_duration={steps}ba", "--procs", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    losses = {str(record["step"]): record["loss"] for record in records if "loss" in record}
    assert list(map(int, losses)) == list(range(1, steps + 1))
    continued = {step: losses[step] for step in EXPECTED[name]}
    here = [platform.machine(), torch.__version__, torch.backends.cpu.get_cpu_capability()]
    if here == [EXPECTED["machine"], *EXPECTED["torch_and_cpu"]]:
        assert continued == EXPECTED[name]
    else:
        # Another CPU or torch has other kernels, which round differently.
        assert continued == pytest.approx(EXPECTED[name], rel=1e-4)
