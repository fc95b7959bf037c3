"""The guide is true: its file loads, its commands run, its error report is what is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from keepstep.cli.main import main

GUIDE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


@pytest.fixture(autouse=True)
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("yaml")
    Path("run.yaml").write_text(text)


@pytest.mark.parametrize("command", [line for block in blocks("sh") for line in block.splitlines()])
def test_every_command_of_the_guide_runs(command: str) -> None:
    program, *words = shlex.split(command.partition(" > ")[0])
    assert program == "keepstep"
    assert main(words) == 0


def test_the_guides_error_report_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("") if block.startswith("$ keepstep")]
    command, *report = block.splitlines()
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err.splitlines() == report


def test_the_guides_sample_of_show_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (sample,) = [block for block in blocks("") if block.startswith("name:")]
    (command,) = [line for block in blocks("sh") for line in block.splitlines() if "--changed" in line]
    assert main(shlex.split(command)[1:]) == 0
    printed = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in sample.splitlines() if line != "…" and re.sub(" +", " ", line) not in printed] == []
