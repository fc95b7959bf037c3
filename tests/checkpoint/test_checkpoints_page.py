"""docs/checkpoints.md: its commands, its run.yaml and its program work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.config.schema import CheckpointConfig
from tests.checkpoint.support import example_state, write_step
from tests.doc_blocks import blocks, commands

PAGE = "docs/checkpoints.md"


def test_checkpoints_page_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        write_step(LocalStore(tmp_path / "runs" / "demo" / "checkpoints"), step, example_state(step), with_parity=True)
    for command in commands(PAGE):
        program, *words = shlex.split(command)
        assert program == "keepstep"
        # `gc` with --keep 2 deletes step 10 and keeps 20, which the conversions use.
        assert main(words) == 0, command


def test_checkpoints_page_run_yaml_is_valid(tmp_path: Path) -> None:
    (text,) = blocks(PAGE, "yaml")
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml", ()).config.checkpoint.parity == 1


def test_checkpoints_page_program_saves(tmp_path: Path) -> None:
    (program,) = blocks(PAGE, "python")
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
