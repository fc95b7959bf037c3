"""docs/planning.md: its commands run with its files."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.doc_blocks import blocks, commands

PAGE = "docs/planning.md"
COMMANDS = [
    pytest.param(command, marks=pytest.mark.slow if "--dry-run" in command and " plan " in command else ())
    for command in commands(PAGE)
]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, mine = blocks(PAGE, "yaml")
    Path("run.yaml").write_text(run)
    Path("mine.yaml").write_text(mine)
    (measured,) = blocks(PAGE, "json")
    Path("measured.json").write_text(measured)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_planning_page_commands_run(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "keepstep"
    assert main(words) == 0
