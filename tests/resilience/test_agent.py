"""The agent: restarts what can be restarted, gives up what cannot, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agent_targets
import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import EXIT_STOPPED
from keepstep.resilience.agent import run_processes
from keepstep.resilience.workers import Task

pytestmark = pytest.mark.slow


def run(
    target: Callable[[list[str]], int], folder: Path, processes: int = 2, **settings: Any
) -> tuple[int, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    code = run_processes(
        Task(target, [str(folder)]),
        processes,
        settings=ResilienceConfig(**settings),
        tell=lambda kind, **facts: events.append({"kind": kind, **facts}),
    )
    return code, events


def test_a_killed_process_is_started_again_with_all_the_others(tmp_path: Path) -> None:
    code, events = run(agent_targets.killed_twice, tmp_path)
    assert code == 0
    assert [event["kind"] for event in events] == ["fault", "restart", "fault", "restart"]
    assert events[0]["rank"] == 1
    assert "SIGKILL" in events[0]["what"]
    assert not events[0]["final"]
    assert len(list(tmp_path.glob("0-*"))) >= 2, "the healthy process starts again as well"


def test_a_run_that_gets_nowhere_is_given_up(tmp_path: Path) -> None:
    code, events = run(agent_targets.never_gets_anywhere, tmp_path, max_restarts=2)
    assert code == 1
    assert [event["kind"] for event in events] == ["fault", "restart"] * 2 + ["fault"]
    assert events[-1]["final"]


def test_what_a_restart_cannot_mend_is_not_restarted(tmp_path: Path) -> None:
    code, events = run(agent_targets.refuses, tmp_path, 1)
    assert code == 1
    assert [event["kind"] for event in events] == ["fault"]
    assert events[0]["final"]
    assert "the loss is nan" in events[0]["what"]


def test_helpers_of_a_dead_process_end_with_it(tmp_path: Path) -> None:
    code, _ = run(agent_targets.leaves_a_helper, tmp_path, 1)
    assert code == 0
    helper = int((tmp_path / "helper").read_text())
    try:
        state = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "gone"
    assert state in ("Z", "gone")


def test_a_process_that_stands_still_is_found_and_named(tmp_path: Path) -> None:
    started = time.monotonic()
    code, events = run(agent_targets.stands_still, tmp_path, 1)
    assert code == 0
    assert events[0]["cause"] == "hang"
    assert "stopped by a signal" in events[0]["what"]
    assert time.monotonic() - started < 20


def test_a_stop_request_reaches_every_process_and_the_code_comes_back(tmp_path: Path) -> None:
    def ask() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    code, events = run(agent_targets.stops_on_request, tmp_path)
    assert code == EXIT_STOPPED
    assert not events
