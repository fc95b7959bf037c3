"""Stopping, being started again, and doing things by the clock: what several processes must decide alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import metrics
from tiny_worlds import run_world

pytestmark = pytest.mark.slow


def events(root: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (root / name / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("mode", ["reproducible=resume", "reproducible=elastic"])
def test_processes_whose_clocks_differ_save_and_end_at_the_same_step(tmp_path: Path, mode: str) -> None:
    """Nobody's clocks agree to the microsecond: a save every half hour must not leave one process behind."""
    words = ["checkpoint.interval=4s", "schedule.name=constant", "schedule.warmup=0ba", "max_duration=20s", mode]
    assert run_world(tmp_path, 2, *words, ticks_s=[0.5, 0.8]) == [0, 0], (tmp_path / "said_0.txt").read_text()
    last = max(line["step"] for line in metrics(tmp_path))
    saved = [event["step"] for event in events(tmp_path, "run", "checkpoint_committed")]
    assert len(saved) >= 4
    assert saved[-1] == last
