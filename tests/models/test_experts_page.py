"""docs/experts.md: its commands run, and its metrics are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.models.moe import ROUTER_METRICS
from tests.doc_blocks import ROOT, commands

PAGE = "docs/experts.md"


@pytest.mark.slow
def test_experts_page_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands(PAGE):
        assert main(command.split()[1:]) == 0
    found = [
        json.loads(line) for file in tmp_path.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()
    ]
    steps = [line for line in found if "loss" in line]
    assert len(steps) == 3 * 4
    for line in steps:
        assert 1 <= line["expert_load_max"] <= 8
        assert 0 < line["expert_load_entropy"] <= 1
        assert line["expert_bias_max"] == 0


def test_experts_page_names_every_router_metric() -> None:
    text = (ROOT / PAGE).read_text()
    assert [name for name in ROUTER_METRICS if f"| `{name}` |" not in text] == []
