"""Steps in memory that outlives the process."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots, newest_snapshot
from tests.checkpoint.in_memory import resize_worker
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


def test_another_layout_finds_nothing(places: list[Path]) -> None:
    memory = InMemorySnapshots(places)
    keep(memory, 5)
    other = state(0.0)
    other["model"]["more"] = torch.zeros(3)
    assert InMemorySnapshots(places).newest(other) is None


@pytest.mark.slow
def test_a_replaced_node_gets_its_steps_back_from_the_one_that_mirrors_them(tmp_path: Path) -> None:
    handles = [[os.memfd_create("test") for _ in range(4)] for _ in range(2)]
    worker = str(Path(__file__).with_name("mirror_worker.py"))

    def run(task: str) -> None:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    worker,
                    str(rank),
                    str(tmp_path / task),
                    task,
                ]
                + [f"/proc/{os.getpid()}/fd/{handle}" for handle in own]
            )
            for rank, own in enumerate(handles)
        ]
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]

    run("keep")
    # The second node is gone, and another one has come with empty memory.
    for handle in handles[1]:
        os.close(handle)
    handles[1] = [os.memfd_create("test") for _ in range(4)]
    run("find")
    for handle in (*handles[0], *handles[1]):
        os.close(handle)


@pytest.mark.slow
def test_whole_tensors_come_back_at_another_number_of_processes(tmp_path: Path) -> None:
    handles = {owner: [os.memfd_create("test") for _ in range(2)] for owner in ("first", "second", "new")}
    places = {owner: [Path(f"/proc/{os.getpid()}/fd/{each}") for each in own] for owner, own in handles.items()}
    worker = str(Path(__file__).with_name("resize_worker.py"))

    def run(task: str, *owners: str) -> None:
        words = [(str(rank), str(tmp_path / task), task, *places[owner]) for rank, owner in enumerate(owners)]
        started = [subprocess.Popen([sys.executable, worker, *each]) for each in words]
        assert [process.wait(PATIENCE_S) for process in started] == [0, 0]

    run("keep", "first", "second")
    # One process alone, and then the second one with another rank and a new one behind it.
    alone, into = InMemorySnapshots(places["first"]), resize_worker.state(0.0, 10)
    assert (alone.newest(into), alone.load(6, into)) == (6, {"step": 6})
    assert torch.equal(into["model"]["weight"], torch.full((1000, 70), 6.0, dtype=torch.bfloat16))
    run("find", "second", "new")
    for handle in chain(*handles.values()):
        os.close(handle)
