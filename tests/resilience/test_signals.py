"""Stop signals: Ctrl-C once, twice, and once but forwarded by a wrapper (timeout, uv, make)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.core.errors import EXIT_STOPPED, UsageError
from keepstep.core.interrupts import ONE_REQUEST_S
from keepstep.resilience.signals import SHUTDOWN_VARIABLE, shutdown_s, stop_on_signals
from tests.patience import PATIENCE_S

TINY = (
    "model.layers=1 model.hidden=16 model.heads=2 model.vocab=64 model.seq_len=8 data=synthetic global_batch=2 "
    "microbatch=1 max_duration=100000ba compute.device=cpu compute.threads=1 observe.tensorboard=false name=it"
)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_shutdown_time_comes_from_the_environment() -> None:
    assert shutdown_s({}) == 540
    assert shutdown_s({SHUTDOWN_VARIABLE: "1740"}) == 1740
    for text in ("soon", "0", "-5", "nan"):
        with pytest.raises(UsageError, match="must be seconds"):
            shutdown_s({SHUTDOWN_VARIABLE: text})


@pytest.mark.slow
def test_second_interrupt_ends_but_a_repeated_one_does_not() -> None:
    with stop_on_signals() as flag:
        interrupt()
        try:
            interrupt()
        except KeyboardInterrupt:
            pytest.fail("the same request was taken for a second one")
        assert flag.requested
        time.sleep(ONE_REQUEST_S)
        with pytest.raises(KeyboardInterrupt):
            interrupt()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_run_saves_when_one_ctrl_c_arrives_twice(tmp_path: Path, processes: int) -> None:
    command = [sys.executable, "-m", "keepstep", "train", *TINY.split(), f"runs_dir={tmp_path}"]
    run = subprocess.Popen([*command, "--procs", str(processes)], stderr=subprocess.PIPE, start_new_session=True)
    metrics = tmp_path / "it" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (metrics.is_file() and metrics.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            # Two that are pending at the same time would be one anyhow.
            time.sleep(0.1)
        _, output = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
    assert run.returncode == EXIT_STOPPED, output.decode()
    assert list((tmp_path / "it" / "checkpoints").glob("step_*"))


def test_blocked_signals_of_the_parent_are_received() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with stop_on_signals() as flag:
            os.kill(os.getpid(), signal.SIGTERM)
            assert flag.signal_name == "SIGTERM"
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.slow
def test_signal_tests_pass_when_the_parent_ignores_signals() -> None:
    tests = ["tests/core/test_interrupts.py", "tests/core/test_threads.py", "tests/core/test_files.py"]
    command = f"trap '' INT HUP QUIT; exec {sys.executable} -m pytest -q -p no:cacheprovider {' '.join(tests)}"
    root = Path(__file__).parents[2]
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
