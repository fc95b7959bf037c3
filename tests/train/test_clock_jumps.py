"""The machine's clock is set while a run trains: nothing waits, fails or turns negative because of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.observe import report
from keepstep.observe.history import open_history
from keepstep.observe.run_folder import RunFolder
from keepstep.observe.verdict import judge
from keepstep.train.telemetry.recorder import Recorder
from tests.train.tiny_runs import committed_steps, losses, run_here

DAY_S = 86_400.0
CLOCK_SET = {3: -DAY_S, 5: 2 * DAY_S}
"""By step: how far the clock is set."""


def test_run_trains_and_saves_while_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, step_done, offset_s = time.time, Recorder.step_done, 0.0

    def set_the_clock(self: Recorder, facts: Any, *numbers: float) -> None:
        nonlocal offset_s
        offset_s += CLOCK_SET.get(facts.step, 0.0)
        step_done(self, facts, *numbers)

    monkeypatch.setattr(Recorder, "step_done", set_the_clock)
    monkeypatch.setattr(time, "time", lambda: real() + offset_s)
    run_here(tmp_path, "max_duration=6ba", "checkpoint.interval=2ba", "checkpoint.keep=9")
    assert committed_steps(tmp_path) == [2, 4, 6]
    assert len(losses(tmp_path)) == 6
    lines = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    jumps = [(line["step"], round(line["seconds"] / DAY_S)) for line in lines if line.get("reason") == "clock_set"]
    assert jumps == [(3, -1), (5, 2)]
    for now in (real(), time.time()):
        history = open_history(RunFolder(tmp_path / "run"))
        verdict = judge(history, now)
        assert verdict.state == "finished"
        assert verdict.checkpoint_age_s >= 0
        assert verdict.silent_s >= 0
        assert "was set back by 1d00h" in report.markdown(history, now)
