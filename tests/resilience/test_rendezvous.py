"""Rendezvous of several agents: a node that leaves does not end the run, and a stop request ends a wait."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import EXIT_HARDWARE, EXIT_STOPPED
from keepstep.resilience.agent import AgentSettings, run_processes
from keepstep.resilience.workers import Task
from tests.patience import PATIENCE_S
from tests.resilience import agent_targets

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def agent(port: int, node: int, nodes: str, target: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "tests.resilience.agent_node", str(port), str(node), nodes, target, str(folder)]
    with (folder / f"log-{node}").open("wb") as log:
        process = subprocess.Popen(words, stderr=log, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_rendezvous_continues_without_an_unfit_node(tmp_path: Path) -> None:
    port = free_port()
    with (
        agent(port, 0, "1:2", "goes_on_without_the_unfit", tmp_path) as host,
        agent(port, 1, "1:2", "goes_on_without_the_unfit", tmp_path) as unfit,
    ):
        assert unfit.wait(PATIENCE_S) == EXIT_HARDWARE
        assert host.wait(PATIENCE_S) == 0, (tmp_path / "log-0").read_text()


def test_waiting_for_data_is_no_hang_on_other_nodes(tmp_path: Path) -> None:
    port = free_port()
    with (
        agent(port, 0, "2", "one_waits_for_data", tmp_path) as host,
        agent(port, 1, "2", "one_waits_for_data", tmp_path) as other,
    ):
        assert (host.wait(PATIENCE_S), other.wait(PATIENCE_S)) == (0, 0), (tmp_path / "log-1").read_text()
    assert len(list(tmp_path.glob("?-*"))) == 2, "nothing was started again"


def test_unexplained_silence_is_a_hang(tmp_path: Path) -> None:
    port = free_port()
    with (
        agent(port, 0, "2", "one_says_nothing", tmp_path) as host,
        agent(port, 1, "2", "one_says_nothing", tmp_path) as other,
    ):
        assert (host.wait(PATIENCE_S), other.wait(PATIENCE_S)) == (0, 0), (tmp_path / "log-1").read_text()
    assert any("no step for" in (tmp_path / f"log-{node}").read_text() for node in range(2))


@pytest.mark.parametrize("node", [0, 1], ids=["for the others", "for the endpoint"])
def test_stop_request_ends_the_wait_for_nodes(tmp_path: Path, node: int) -> None:
    with agent(free_port(), node, "2", "announces", tmp_path) as waiting:
        wait_until(lambda: listens(waiting.pid))
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(PATIENCE_S) == EXIT_STOPPED
        assert "stopped on request" in (tmp_path / f"log-{node}").read_text()


def test_stop_request_ends_the_pause_after_a_fault(tmp_path: Path) -> None:
    paused = threading.Event()

    def on_event(kind: str, **_: object) -> None:
        # The fourth fault in a row is followed by a pause of eight seconds.
        if kind == "fault" and len(list(tmp_path.glob("0-*"))) == 5:
            paused.set()

    def ask() -> None:
        paused.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    settings = AgentSettings(ResilienceConfig(max_restarts=20), on_event=on_event)
    task = Task(agent_targets.finds_storage_broken, [str(tmp_path)])
    assert run_processes(task, 1, settings=settings) == EXIT_STOPPED
    assert len(list(tmp_path.glob("0-*"))) == 5, "nothing was started after the request"


def listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
