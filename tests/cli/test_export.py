"""`keepstep export` names the step that it ships."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.train.tiny_runs import run_here

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_here(tmp_path, "checkpoint.interval=2ba", "checkpoint.keep=3", "max_duration=6ba")
    return tmp_path / "run"


def test_export_of_a_finished_run_ships_its_last_step(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["export", str(run), "--hf", str(tmp_path / "hf"), "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["saved_step"], facts["last_step"], facts["skipped_saves"]) == (6, 6, 0)
    assert "warning" not in err


def test_export_says_that_later_steps_are_not_on_disk(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    capsys.readouterr()
    assert main(["export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    out, err = capsys.readouterr()
    assert "step         4, the newest on disk; the run reached step 6" in out
    assert "warning: not on disk, so not in the export: steps 5 to 6" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hf", "out", "--type", "q8_0"], "--type is q8_0, but it is for --gguf"),
        (["--gguf", "out", "--dtype", "bf16"], "--dtype is bf16, but it is for --hf"),
        (["--adapter", "out", "--dtype", "bf16"], "--dtype is bf16, but it is for --hf"),
    ],
)
def test_export_refuses_an_option_of_another_format(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", *words]) == 2
    assert told in capsys.readouterr().err
