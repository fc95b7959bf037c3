"""What docs/parallelism.md shows, works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from keepstep.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


COMMANDS = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[1] != "train"], ids=" ".join)
def test_the_checks_on_the_page_pass(command: list[str]) -> None:
    assert main(command[1:]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [words for words in COMMANDS if words[1] == "train"], ids=" ".join)
def test_the_run_on_the_page_trains(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0, capfd.readouterr().err
    assert "done" in capfd.readouterr().out


def test_the_error_report_on_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("") if block.startswith("$ keepstep")]
    command, *report = block.splitlines()
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err.splitlines() == report
