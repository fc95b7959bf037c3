from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.callbacks import Callback
from keepstep.library.training import Follower
from keepstep.observe.run_folder import JsonLines, RunFolder


class Log(Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.steps = 0

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps += 1
        self.calls.append(("step", step, metrics["loss"]))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", step, metrics["valid_loss"]))

    def on_save(self, step: int, path: str) -> None:
        self.calls.append(("save", step, Path(path).name))

    def on_fault(self, step: int, message: str) -> None:
        self.calls.append(("fault", step, message))

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.calls.append(("load", state["steps"]))
        self.steps = int(str(state["steps"]))


class Writer:
    """Writes what a run would write, one second of its time after another."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root).create()
        self._metrics, self._events, self._time = JsonLines(self.folder.metrics), JsonLines(self.folder.events), 0.0

    def step(self, step: int) -> None:
        self._write(self._metrics, {"step": step, "loss": float(step)})

    def evaluation(self, step: int) -> None:
        self._write(self._metrics, {"step": step, "valid_loss": 0.5})

    def event(self, kind: str, step: int, **facts: Any) -> None:
        self._write(self._events, {"kind": kind, "step": step, **facts})

    def _write(self, file: JsonLines, line: dict[str, Any]) -> None:
        self._time += 1
        file.append({"time": self._time, **line})


def test_follower_calls_in_the_order_of_the_run(tmp_path: Path) -> None:
    run, log = Writer(tmp_path), Log()
    run.step(1)
    follower = Follower(run.folder, [log])
    run.step(2)
    run.event("checkpoint_committed", 2, folder="step_00000002")
    run.evaluation(2)
    run.event("fault", 2, what="rank 1 was killed")
    follower.poll()
    follower.poll()
    expected = [("step", 2, 2.0), ("save", 2, "step_00000002"), ("evaluation", 2, 0.5)]
    assert log.calls[:3] == expected
    (fault,) = log.calls[3:]
    assert fault[:2] == ("fault", 2)
    assert "rank 1 was killed" in fault[2]


def test_follower_restores_states_when_steps_repeat(tmp_path: Path) -> None:
    run, log = Writer(tmp_path), Log()
    follower = Follower(run.folder, [log])
    for step in (1, 2, 3):
        run.step(step)
    # The save of step 2 is committed during step 3: its state is that of step 2.
    run.event("checkpoint_committed", 2, folder="step_00000002")
    run.step(4)
    run.step(3)
    follower.poll()
    assert ("load", 2) in log.calls
    assert log.steps == 3


def test_follower_of_a_later_call_starts_from_the_saved_state(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    first = Follower(run.folder, [Log()])
    for step in (1, 2, 3):
        run.step(step)
    run.event("checkpoint_committed", 2, folder="step_00000002")
    first.poll()
    log = Log()
    second = Follower(run.folder, [log])
    run.step(3)
    second.poll()
    assert log.calls == [("load", 2), ("step", 3, 3.0)]
    assert log.steps == 3


def test_follower_survives_a_damaged_state_file(tmp_path: Path) -> None:
    run, log = Writer(tmp_path), Log()
    (run.folder.root / "callbacks.json").write_text("[1, 2")
    follower = Follower(run.folder, [log])
    run.step(1)
    follower.poll()
    assert log.calls == [("step", 1, 1.0)]


def test_follower_continues_after_an_interrupt_in_a_callback(tmp_path: Path) -> None:
    class Interrupts(Log):
        def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
            super().on_step(step, metrics)
            if step == 1:
                raise KeyboardInterrupt

    run, log = Writer(tmp_path), Interrupts()
    follower = Follower(run.folder, [log])
    for step in (1, 2, 3):
        run.step(step)
    with pytest.raises(KeyboardInterrupt):
        follower.poll()
    follower.poll()
    assert [step for _, step, _ in log.calls] == [1, 2, 3]
