"""The page is true: its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from keepstep.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, mine = blocks("yaml")
    Path("run.yaml").write_text(run)
    Path("mine.yaml").write_text(mine)
    (measured,) = blocks("json")
    Path("measured.json").write_text(measured)


def commands() -> list[object]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [pytest.param(line, marks=pytest.mark.slow if "--dry-run" in line else ()) for line in lines]


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_page_runs(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "keepstep"
    assert main(words) == (3 if "# does not fit" in command else 0)
