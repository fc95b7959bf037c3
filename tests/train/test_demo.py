"""The demo, where somebody does not let it come to its end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.train import demo

TRAINING = """#!/bin/sh
trap 'echo saved > {folder}/saved; exit 75' TERM
echo started > {folder}/started
for _ in $(seq 600); do sleep 0.1; done
"""


def test_demo_that_is_stopped_stops_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = tmp_path / "training"
    training.write_text(TRAINING.format(folder=tmp_path))
    training.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(training))
    # The second part of it, in which the demo only waits.
    monkeypatch.setattr(demo, "_interrupt", lambda *_, **__: 24)
    really = subprocess.Popen.wait

    def asked_to_end(_: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", really)
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", asked_to_end)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(tmp_path / "runs", "demo", 60)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("steps", [-1, 0, 1, 10])
def test_demo_with_too_few_steps_is_refused(steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", str(steps), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --steps is {steps}, but ")
    assert not (tmp_path / "runs").exists()
