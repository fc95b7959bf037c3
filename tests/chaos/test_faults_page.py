"""docs/faults.md: its commands work, and it names every fault."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, commands
from tests.patience import PATIENCE_S

PAGE = "docs/faults.md"


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(PAGE))
def test_faults_page_commands_run(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_faults_page_names_every_fault(tmp_path: Path) -> None:
    from keepstep.chaos.experiment import Experiment
    from keepstep.chaos.scenarios import all_scenarios

    page = (ROOT / PAGE).read_text()
    for kind in all_scenarios(Experiment([], tmp_path, 24, 2, 60.0)):
        assert f"`{kind}`" in page
