"""docs/parallelism.md: its commands run, and its error report is what is printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.doc_blocks import blocks, commands

PAGE = "docs/parallelism.md"
COMMANDS = [shlex.split(command) for command in commands(PAGE)]


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[1] != "train"], ids=" ".join)
def test_parallelism_page_checks_pass(command: list[str]) -> None:
    assert main(command[1:]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [words for words in COMMANDS if words[1] == "train"], ids=" ".join)
def test_parallelism_page_run_trains(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0, capfd.readouterr().err
    assert "done" in capfd.readouterr().out


def test_parallelism_page_error_report_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks(PAGE, "") if block.startswith("$ keepstep")]
    command, *report = block.splitlines()
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err.splitlines() == report
