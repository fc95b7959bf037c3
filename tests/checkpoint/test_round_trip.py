"""What is saved comes back, bit for bit, in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError
from tests.checkpoint.support import example_state, same_tensors, zeroed


@pytest.fixture
def events() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def checkpointer(tmp_path: Path, events: list[tuple[str, dict[str, Any]]]) -> Iterator[Checkpointer]:
    made = Checkpointer(
        tmp_path / "checkpoints", CheckpointConfig(keep=2), lambda kind, facts: events.append((kind, facts))
    )
    yield made
    made.close()


def test_state_comes_back_bit_for_bit_with_its_plain_values(checkpointer: Checkpointer) -> None:
    checkpointer.save(5, example_state(1), {"note": "first"})
    into = zeroed(example_state(1))
    loaded = checkpointer.load_newest(into)
    assert loaded is not None
    assert (loaded.step, loaded.metadata["note"]) == (5, "first")
    assert loaded.values["progress"] == example_state(1)["progress"]
    assert same_tensors(example_state(1), into)


def test_no_checkpoint_is_none_and_not_an_error(checkpointer: Checkpointer) -> None:
    assert checkpointer.find() is None
    assert checkpointer.load_newest(zeroed(example_state(1))) is None


def test_keep_counts_committed_steps_and_latest_names_the_newest(checkpointer: Checkpointer, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpointer.save(step, example_state(step), {})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", "step_00000003"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000003"


def test_a_damaged_step_is_named_and_the_one_before_it_is_loaded(
    checkpointer: Checkpointer, tmp_path: Path, events: list[tuple[str, dict[str, Any]]]
) -> None:
    checkpointer.save(1, example_state(1), {})
    checkpointer.save(2, example_state(2), {})
    (data,) = (tmp_path / "checkpoints" / "step_00000002").glob("rank*.safetensors")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    into = zeroed(example_state(1))
    loaded = checkpointer.load_newest(into)
    assert loaded is not None
    assert loaded.step == 1
    assert same_tensors(example_state(1), into)
    kind, facts = events[-1]
    assert kind == "warning"
    assert data.name in facts["message"]


def test_when_all_steps_are_damaged_the_run_does_not_start_over_in_silence(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    checkpointer.save(1, example_state(1), {})
    (data,) = (tmp_path / "checkpoints" / "step_00000001").glob("rank*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="can be loaded"):
        checkpointer.load_newest(zeroed(example_state(1)))


def test_a_tensor_of_another_shape_is_refused_by_name(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, example_state(1), {})
    into = zeroed(example_state(1))
    into["model"]["half"] = torch.zeros(33, 8, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model\.half"):
        checkpointer.load_newest(into)


def test_a_section_may_be_left_out_but_a_single_tensor_may_not(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, example_state(1), {})
    weights = {"model": zeroed(example_state(1))["model"]}
    assert checkpointer.load_newest(weights) is not None
    assert same_tensors(weights["model"], example_state(1)["model"])
    del weights["model"]["half"]
    with pytest.raises(CheckpointError, match=r"model\.half"):
        checkpointer.load_newest(weights)


def test_going_back_writes_the_step_again_beside_the_old_one_and_the_newer_commit_wins(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = Checkpointer(folder, CheckpointConfig(keep=0))
    for step in (1, 2, 3):
        first.save(step, example_state(step), {})
    first.close()
    back = Checkpointer(folder, CheckpointConfig(keep=0, resume_from=str(folder / "step_00000001")))
    loaded = back.load_newest(zeroed(example_state(1)))
    assert loaded is not None
    assert loaded.step == 1
    back.save(2, example_state(22), {})
    back.close()
    newest = Checkpointer(folder, CheckpointConfig(keep=0)).find()
    assert newest is not None
    assert newest.name == "step_00000002.1"


def test_data_files_are_plain_safetensors_that_any_tool_opens(checkpointer: Checkpointer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = example_state(1)
    checkpointer.save(1, state, {})
    (data,) = (tmp_path / "checkpoints" / "step_00000001").glob("*.safetensors")
    assert torch.equal(load_file(data)["model.embed.weight"], state["model"]["embed.weight"])


def test_a_value_that_json_cannot_give_back_is_refused_by_name(checkpointer: Checkpointer) -> None:
    with pytest.raises(CheckpointError, match=r"progress\.when"):
        checkpointer.save(1, {"progress": {"when": object()}}, {})
    with pytest.raises(CheckpointError, match=r"metadata\.loss is a Tensor"):
        checkpointer.save(1, example_state(1), {"loss": torch.tensor(2.1)})
    checkpointer.save(1, example_state(1), {"loss": 2.1})


def test_another_optimizers_state_is_told_from_another_model(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"model": example_state(1)["model"], "optimizer": {"m": torch.zeros(2)}}, {})
    with pytest.raises(CheckpointError, match=r"optimizer\.m") as caught:
        checkpointer.load_newest(zeroed(example_state(1)))
    assert caught.value.hint
    assert "checkpoint.skip_optimizer=true" in caught.value.hint


@pytest.mark.parametrize("hidden", [0o077, 0o027])
def test_checkpoints_follow_the_umask(checkpointer: Checkpointer, tmp_path: Path, hidden: int) -> None:
    """The page says so: with `umask 077` nobody else can read the weights."""
    before = os.umask(hidden)
    try:
        checkpointer.save(5, example_state(1), {})
    finally:
        os.umask(before)
    written = [tmp_path / "checkpoints", *(tmp_path / "checkpoints").rglob("*")]
    assert len(written) > 4
    assert [path for path in written if path.stat().st_mode & hidden] == []
