"""The commands in README and on the pages about training work as written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, blocks, commands
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *words = shlex.split(command)
    assert program == "keepstep"
    return subprocess.run(
        [sys.executable, "-m", "keepstep", *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
    )


def shortened(command: str) -> str:
    """The same command with fewer steps, if the page does not set the duration."""
    trains = command.startswith("keepstep train")
    return f"{command} max_duration=10ba" if trains and "max_duration" not in command else command


def test_training_page_commands_run(tmp_path: Path) -> None:
    for command in commands("docs/training.md"):
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert list((tmp_path / "runs" / "profiled" / "profile").glob("trace_*.json"))


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/reproducibility.md", "docs/guard.md"])
def test_page_commands_run(tmp_path: Path, page: str) -> None:
    for command in commands(page):
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_readme_commands_run(tmp_path: Path) -> None:
    typed = commands("README.md")
    assert typed[:2] == ["make demo", "make test"]
    for command in typed[2:]:
        done = run(shortened(command), tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    (example,) = blocks("README.md", "console")
    command, *report = example.strip().splitlines()
    refused = run(command.removeprefix("$ "), tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.strip().splitlines() == report


def test_make_targets_on_pages_exist() -> None:
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    named = [line for page in ("README.md", "CONTRIBUTING.md") for line in commands(page) if line.startswith("make ")]
    assert named
    assert {line.split()[1] for line in named} <= targets


def test_demo_trains_stops_resumes_and_beats_baseline(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "demo", "--steps", "120", "--runs-dir", str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "interrupted     at step" in done.stdout
    assert "resumed at step" in done.stderr
    assert (tmp_path / "runs" / "demo" / "loss.png").stat().st_size > 5000
