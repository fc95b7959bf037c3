"""The agent: restarts what can be restarted, gives up what cannot, and leaves no process behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import agent_targets
import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import EXIT_STOPPED
from keepstep.resilience import scratch
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


def test_a_cleaner_of_temporary_files_does_not_keep_a_run_from_restarting(tmp_path: Path) -> None:
    code, events = run(agent_targets.loses_its_scratch_folder, tmp_path, 1)
    assert code == 0
    assert [event["kind"] for event in events] == ["fault", "restart"]


def test_agents_that_start_at_the_same_moment_leave_each_other_s_folders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, []

    def lock_after_another_has_swept(file: object, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(1)
            scratch._sweep(Path(tempfile.gettempdir()))
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", lock_after_another_has_swept)
    with scratch.scratch_folder() as folder:
        (folder / "cause-0.json").write_text("{}")


def test_a_process_that_hangs_when_its_agent_is_killed_does_not_stay_for_ever(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("agent_node.py"))
    agent = subprocess.Popen([sys.executable, script, "0", "0", "1", "hangs_and_will_not_stop", str(tmp_path)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = int((tmp_path / "pid").read_text())
    agent.kill()
    agent.wait()
    try:
        while is_running(worker):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_what_the_scheduler_grants_for_a_stop_is_what_the_processes_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1.5")
    asked_at: list[float] = []

    def ask() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        asked_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    code, _ = run(agent_targets.hangs_and_will_not_stop, tmp_path, 1)
    took_s = time.monotonic() - asked_at[0]
    assert code == EXIT_STOPPED
    assert 1.5 <= took_s < 60
    assert "did not stop within 2 s" in capfd.readouterr().err


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stop_request_is_heard_while_the_processes_are_being_started(tmp_path: Path) -> None:
    # Ctrl-C while everything is imported reaches the warm process as well, however young it is.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any('forkserver' in word for word in sys.orig_argv):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
    )
    program = (
        "import sys, agent_targets\n"
        "from keepstep.resilience.agent import run_processes\n"
        "from keepstep.resilience.workers import Task\n"
        "folder = agent_targets.SlowToArrive(sys.argv[1])\n"
        "sys.exit(run_processes(Task(agent_targets.never_stops_by_itself, [folder]), 2))\n"
    )
    paths = (tmp_path, Path(__file__).parent, *sys.path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.splitlines()) == (
        EXIT_STOPPED,
        [
            "stopped on request: nothing new was there to save",
            " hint: start the same command to go on from the last checkpoint",
        ],
    )
    assert not (tmp_path / "started").exists()
