"""The agent: restarts what can be restarted, gives up what cannot, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import EXIT_STOPPED, EXIT_STORAGE_FULL
from keepstep.core.interrupts import ONE_REQUEST_S
from keepstep.resilience.agent import AgentSettings, run_processes
from keepstep.resilience.signals import SHUTDOWN_S
from keepstep.resilience.workers import Task
from tests.patience import PATIENCE_S
from tests.resilience import agent_targets
from tests.small_disk import small_disk

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run(
    target: Callable[[list[str]], int], folder: Path, processes: int = 2, **settings: Any
) -> tuple[int, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    code = run_processes(
        Task(target, [str(folder)]),
        processes,
        settings=AgentSettings(
            ResilienceConfig(**settings), on_event=lambda kind, **facts: events.append({"kind": kind, **facts})
        ),
    )
    return code, events


def test_agent_restarts_all_processes_after_a_kill(tmp_path: Path) -> None:
    code, events = run(agent_targets.killed_twice, tmp_path)
    assert code == 0
    assert [event["kind"] for event in events] == ["fault", "restart", "fault", "restart"]
    assert events[0]["rank"] == 1
    assert "SIGKILL" in events[0]["what"]
    assert not events[0]["final"]
    assert len(list(tmp_path.glob("0-*"))) >= 2, "the healthy process starts again as well"


def test_agent_gives_up_without_progress(tmp_path: Path) -> None:
    code, events = run(agent_targets.never_gets_anywhere, tmp_path, max_restarts=2)
    assert code == 1
    assert [event["kind"] for event in events] == ["fault", "restart"] * 2 + ["fault"]
    assert events[-1]["final"]


def test_agent_does_not_restart_what_cannot_heal(tmp_path: Path) -> None:
    code, events = run(agent_targets.refuses, tmp_path, 1)
    assert code == 1
    assert [event["kind"] for event in events] == ["fault"]
    assert events[0]["final"]
    assert "the loss is nan" in events[0]["what"]


def test_agent_kills_helpers_of_a_dead_process(tmp_path: Path) -> None:
    code, _ = run(agent_targets.leaves_a_helper, tmp_path, 1)
    assert code == 0
    helper = int((tmp_path / "helper").read_text())
    try:
        state = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "gone"
    assert state in ("Z", "gone")


def test_agent_names_a_stopped_process(tmp_path: Path) -> None:
    code, events = run(agent_targets.stands_still, tmp_path, 1)
    assert code == 0
    assert events[0]["cause"] == "hang"
    assert "stopped by a signal" in events[0]["what"]


def test_stop_request_reaches_every_process(tmp_path: Path) -> None:
    def ask() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    code, events = run(agent_targets.stops_on_request, tmp_path)
    assert code == EXIT_STOPPED
    assert not events


def test_agent_restarts_after_its_scratch_folder_vanished(tmp_path: Path) -> None:
    code, events = run(agent_targets.loses_its_scratch_folder, tmp_path, 1)
    assert code == 0
    assert [event["kind"] for event in events] == ["fault", "restart"]


@pytest.mark.parametrize("target", ["hangs_and_will_not_stop", "waits_for_others"])
def test_hanging_process_ends_after_its_agent(tmp_path: Path, target: str) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.resilience.agent_node",
        "0",
        "0",
        "1",
        target,
        str(tmp_path),
    ]
    agent = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = int((tmp_path / "pid").read_text())
    agent.kill()
    agent.wait()
    # One that had begun to work would have nine minutes, and all that time nobody could start the run again.
    deadline = time.monotonic() + SHUTDOWN_S / 3
    try:
        while is_running(worker):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_stop_timeout_is_the_schedulers(
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
    assert took_s >= 1.5
    assert "did not stop within 2 s" in capfd.readouterr().err


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_stop_request_during_start(tmp_path: Path) -> None:
    # Ctrl-C while everything is imported reaches the warm process as well, however young it is.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any('forkserver' in word for word in sys.orig_argv):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
    )
    program = (
        "import sys\n"
        "from tests.resilience import agent_targets\n"
        "from keepstep.resilience.agent import run_processes\n"
        "from keepstep.resilience.workers import Task\n"
        "folder = agent_targets.SlowToArrive(sys.argv[1])\n"
        "sys.exit(run_processes(Task(agent_targets.never_stops_by_itself, [folder]), 2))\n"
    )
    paths = (tmp_path, ROOT, *sys.path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr.splitlines()) == (
        EXIT_STOPPED,
        [
            "SIGINT: stopping before the first step; Ctrl-C again to stop without saving",
            "stopped on request: there was nothing new to save",
            " hint: start the same command to resume from the last checkpoint",
        ],
    )
    assert not (tmp_path / "started").exists()


def test_agent_waits_for_room_without_spending_restarts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with small_disk(tmp_path / "disk", 4) as disk:
        disk.fill()

        def make_room() -> None:
            while not list(marks.glob("0-*")):
                time.sleep(0.02)
            time.sleep(2)
            disk.empty()

        threading.Thread(target=make_room, daemon=True).start()
        task = Task(agent_targets.fills_a_file, [str(marks), str(disk.folder)])
        settings = AgentSettings(ResilienceConfig(max_restarts=1), storage_wait_s=60, run_folder=disk.folder)
        assert run_processes(task, 1, settings=settings) == 0
    assert len(list(marks.glob("0-*"))) == 2, "one attempt that failed, and one when there was room"
    warning, hint = capfd.readouterr().err.splitlines()
    assert "No space left on device" in warning
    assert "waiting up to 1m00s for 1.0 MiB free in" in warning
    assert hint == " hint: free some space"


def test_agent_gives_up_on_a_full_disk_after_the_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with small_disk(tmp_path / "disk", 4) as disk:
        disk.fill()
        task = Task(agent_targets.fills_a_file, [str(marks), str(disk.folder)])
        assert run_processes(task, 1, settings=AgentSettings(storage_wait_s=2)) == EXIT_STORAGE_FULL
    assert len(list(marks.glob("0-*"))) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["warning", " hint", "error", " hint"]


def test_second_ctrl_c_lets_a_save_finish(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt_twice() -> None:
        while not (tmp_path / "writing").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(ONE_REQUEST_S + 0.5)
        os.kill(os.getpid(), signal.SIGINT)
        (tmp_path / "asked_twice").touch()

    threading.Thread(target=interrupt_twice, daemon=True).start()
    code, _ = run(agent_targets.saves_slowly, tmp_path, 1)
    assert code == 128 + signal.SIGINT
    assert (tmp_path / "saved").exists()
    assert "finishing the save under way" in capfd.readouterr().err
