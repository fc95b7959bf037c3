"""What docs/checkpoints.md shows, works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from support import example_state, write_step

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.store import LocalStore
from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.config.schema import CheckpointConfig

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def test_every_command_of_the_page_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        write_step(LocalStore(tmp_path / "runs" / "demo" / "checkpoints"), step, example_state(step), with_parity=True)
    for line in "".join(blocks("sh")).splitlines():
        program, *words = shlex.split(line)
        assert program == "keepstep"
        # `gc` with --keep 2 takes step 10 away and leaves 20, which the conversions use.
        assert main(words) == 0, line


def test_the_page_s_run_file_is_sound(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml", ()).config.checkpoint.parity == 1


def test_the_page_s_program_saves(tmp_path: Path) -> None:
    (program,) = blocks("python")
    weight = torch.nn.Parameter(torch.ones(3))
    names = {
        "Checkpointer": Checkpointer,
        "CheckpointConfig": CheckpointConfig,
        "folder": tmp_path,
        "state": {"model": {"weight": weight.detach()}},
        "step": 1,
        "loss": (weight * 2).sum(),
        "optimizer": torch.optim.SGD([weight], lr=0.1),
    }
    exec(program, names)
    assert (tmp_path / "step_00000001" / "_SUCCESS").exists()
