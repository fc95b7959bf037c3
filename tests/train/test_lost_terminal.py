"""A run outlives what it prints to: a terminal that goes away, a log on a full disk."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keepstep.chaos.experiment import session_members
from keepstep.core.errors import EXIT_STOPPED
from keepstep.resilience.fault_injection import Fault, to_environment
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import TINY, losses

pytestmark = pytest.mark.slow

ENDLESS = [*TINY, "max_duration=1000000ba", "checkpoint.interval=1000000ba", "evaluate.interval=0ba"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def wait_for_step(process: subprocess.Popen[bytes], root: Path, step: int, meanwhile: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (root / "run" / "metrics.jsonl").exists() or len(losses(root)) < step:
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.02)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever comes, nothing outlives the test."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_run_saves_when_its_terminal_goes_away(tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    os.set_blocking(terminal, False)
    words = [sys.executable, "-m", "keepstep", "train", *ENDLESS, f"runs_dir={tmp_path}", "--procs", "2"]
    # `setsid --ctty` makes it the run's own terminal, so that its end is a hang-up for the run; which counts even where
    # these tests themselves run under nohup.
    own = ["setsid", "--ctty", "--wait", "env", "--default-signal=HUP"]
    process = subprocess.Popen([*own, *words], stdin=inside, stdout=inside, stderr=inside, env=ENVIRONMENT)
    os.close(inside)

    def read() -> None:
        with suppress(BlockingIOError):
            os.read(terminal, 65536)

    with ended(process):
        wait_for_step(process, tmp_path, 3, read)
        os.close(terminal)
        assert process.wait(PATIENCE_S) == EXIT_STOPPED
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == [f"step_{len(losses(tmp_path)):08d}"]


def test_nohup_run_outlives_its_terminal(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "keepstep", "train", *ENDLESS, f"runs_dir={tmp_path}", "--procs", "1"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["nohup", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
        )
    with ended(process):
        wait_for_step(process, tmp_path, 2, lambda: None)
        # Shells hang up on their own jobs, login managers on every process of a session.
        for member in session_members(process.pid):
            os.kill(member, signal.SIGHUP)
        wait_for_step(process, tmp_path, len(losses(tmp_path)) + 20, lambda: None)
        process.terminate()
        assert process.wait(PATIENCE_S) == EXIT_STOPPED


@pytest.mark.parametrize("restarts", [0, 1], ids=["one process", "under the agent"])
def test_full_disk_under_the_log_does_not_end_the_run(tmp_path: Path, restarts: int) -> None:
    words = [*TINY, f"runs_dir={tmp_path}", f"resilience.max_restarts={restarts}", "--procs", "1"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "keepstep", "train", *words],
            stdout=full,
            stderr=full,
            env=ENVIRONMENT,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0
    assert len(losses(tmp_path)) == 6


def test_full_disk_under_events_does_not_prevent_recovery(tmp_path: Path) -> None:
    folder, marks = tmp_path / "run", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    (folder / "events.jsonl").symlink_to("/dev/full")
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "train", *TINY, f"runs_dir={tmp_path}", "--procs", "1"],
        env={**ENVIRONMENT, **to_environment([Fault("kill", 3)], marks)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "event fault is not in" in done.stderr
    assert len(losses(tmp_path)) == 6
