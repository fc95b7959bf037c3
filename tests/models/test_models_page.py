"""docs/models.md: its Python and its commands run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from tests.doc_blocks import blocks, commands
from tests.interop.test_hf_config import LLAMA_1B

PAGE = "docs/models.md"


def test_models_page_python_runs_in_order() -> None:
    names: dict[str, Any] = {}
    for code in blocks(PAGE, "python"):
        exec(code, names)
    assert names["logits"].shape == (2, 1, 1024)
    assert names["parameters"] == sum(parameter.numel() for parameter in names["model"].parameters())


@pytest.mark.parametrize("command", commands(PAGE))
def test_models_page_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA_1B))
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out
