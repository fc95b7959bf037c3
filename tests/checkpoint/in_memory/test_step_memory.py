"""Steps in memory that outlives the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots, newest_snapshot
from tests.patience import PATIENCE_S


@pytest.fixture
def places() -> Any:
    handles = [os.memfd_create("test") for _ in range(2)]
    yield [Path(f"/proc/{os.getpid()}/fd/{handle}") for handle in handles]
    for handle in handles:
        os.close(handle)


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((300, 100), value), "scalar": torch.tensor(value)},
        "optimizer": {"weight": {"step": torch.tensor(value), "moment": torch.full((7,), value, dtype=torch.bfloat16)}},
        "rank": {"cpu": torch.full((5,), int(value), dtype=torch.uint8)},
    }


def keep(memory: InMemorySnapshots, step: int) -> None:
    memory.save(step, state(float(step)), {"numbers": {"step": step}, "tail": []})
    memory.join()


def test_the_newest_step_comes_back_in_another_process(places: list[Path]) -> None:
    assert newest_snapshot(places) == -1
    first = InMemorySnapshots(places)
    for step in (5, 6, 7):
        keep(first, step)
    first.close()
    assert newest_snapshot(places) == 7
    second = InMemorySnapshots(places)
    into = state(0.0)
    assert second.newest(into) == 7
    assert second.newest(into, before=7) == 6
    assert second.load(7, into)["numbers"] == {"step": 7}
    assert torch.equal(into["model"]["weight"], torch.full((300, 100), 7.0))
    assert torch.equal(into["optimizer"]["weight"]["moment"], torch.full((7,), 7.0, dtype=torch.bfloat16))
    keep(second, 8)
    assert second.newest(into, before=8) == 7, "the step that was loaded is not the one to be overwritten"
    second.close()


def test_a_copy_that_did_not_end_leaves_the_step_before(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = InMemorySnapshots(places)
    keep(memory, 5)
    keep(memory, 6)

    def die(*_: object) -> None:
        raise RuntimeError("killed in the middle of a copy")

    monkeypatch.setattr("keepstep.checkpoint.async_save.staging.StagingBuffer.start", die)
    with pytest.raises(RuntimeError):
        memory.save(7, state(7.0), {})
    assert InMemorySnapshots(places).newest(state(0.0)) == 6


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": torch.zeros(300, 100), "scalar": torch.tensor(0.0), "more": torch.zeros(3)},
        {"weight": torch.zeros(300, 100)},
        {"weight": torch.zeros(100, 300), "scalar": torch.tensor(0.0)},
        {"weight": torch.zeros(300, 100).bfloat16(), "scalar": torch.tensor(0.0)},
    ],
    ids=["one more tensor", "one less", "another shape", "another dtype"],
)
def test_another_model_finds_nothing(places: list[Path], changed: dict[str, torch.Tensor]) -> None:
    memory = InMemorySnapshots(places)
    keep(memory, 5)
    assert InMemorySnapshots(places).newest({**state(0.0), "model": changed}) is None


@pytest.mark.slow
def test_any_number_of_processes_in_any_layout_loads_what_the_memory_covers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.in_memory.resize"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed") == 4
