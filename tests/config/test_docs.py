"""docs/configuration.md: its file loads, its commands run, its outputs are current."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.doc_blocks import blocks, commands

PAGE = "docs/configuration.md"


@pytest.fixture(autouse=True)
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks(PAGE, "yaml")
    Path("run.yaml").write_text(text)


@pytest.mark.parametrize("command", commands(PAGE))
def test_configuration_page_commands_run(command: str) -> None:
    program, *words = shlex.split(command.partition(" > ")[0])
    assert program == "keepstep"
    assert main(words) == 0


def test_configuration_page_error_report_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks(PAGE, "") if block.startswith("$ keepstep")]
    command, *report = block.splitlines()
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err.splitlines() == report


def test_configuration_page_show_output_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    (sample,) = [block for block in blocks(PAGE, "") if block.startswith("name:")]
    (command,) = [command for command in commands(PAGE) if "--changed" in command]
    assert main(shlex.split(command)[1:]) == 0
    printed = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in sample.splitlines() if line != "…" and re.sub(" +", " ", line) not in printed] == []
