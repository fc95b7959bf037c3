"""What docs/models.md shows, works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_python_on_the_page_runs_in_order() -> None:
    names: dict[str, Any] = {}
    for code in blocks("python"):
        exec(code, names)
    assert names["logits"].shape == (2, 1, 1024)
    assert names["parameters"] == sum(parameter.numel() for parameter in names["model"].parameters())


@pytest.mark.parametrize("command", [line for block in blocks("sh") for line in block.splitlines()])
def test_the_commands_on_the_page_end_well(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out
