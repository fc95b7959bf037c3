"""What docs/faults.md shows, works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_fault_is_on_the_page(tmp_path: Path) -> None:
    from keepstep.launch.plays import all_plays
    from keepstep.launch.rehearsal import Stage

    for kind in all_plays(Stage([], tmp_path, 24, 2, 60.0)):
        assert f"`{kind}`" in PAGE
