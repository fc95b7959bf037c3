"""Ctrl-C once, twice, and once told twice: wrappers (timeout, uv, make) pass on what the terminal has sent already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.core.endings import ONE_REQUEST_S
from keepstep.core.errors import EXIT_STOPPED, UsageError
from keepstep.resilience.signals import SHUTDOWN_VARIABLE, shutdown_s, stop_on_signals

TINY = (
    "model.layers=1 model.hidden=16 model.heads=2 model.vocab=64 model.seq_len=8 data=synthetic global_batch=2 "
    "microbatch=1 max_duration=100000ba compute.device=cpu compute.threads=1 observe.tensorboard=false name=it"
)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_a_scheduler_that_waits_longer_gives_the_save_longer() -> None:
    assert shutdown_s({}) == 540
    assert shutdown_s({SHUTDOWN_VARIABLE: "1740"}) == 1740
    for text in ("soon", "0", "-5", "nan"):
        with pytest.raises(UsageError, match="must be seconds"):
            shutdown_s({SHUTDOWN_VARIABLE: text})


def test_one_request_told_twice_is_one_and_a_later_one_ends_at_once() -> None:
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
def test_a_run_that_hears_of_one_ctrl_c_twice_saves(tmp_path: Path, processes: int) -> None:
    command = [sys.executable, "-m", "keepstep", "train", *TINY.split(), f"runs_dir={tmp_path}"]
    run = subprocess.Popen([*command, "--procs", str(processes)], stderr=subprocess.PIPE, start_new_session=True)
    metrics = tmp_path / "it" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            # Two that are pending at the same time would be one anyhow.
            time.sleep(0.1)
        _, told = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == EXIT_STOPPED, told.decode()
    assert list((tmp_path / "it" / "checkpoints").glob("step_*"))


def test_a_run_whose_parent_held_signals_back_hears_them_all_the_same() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with stop_on_signals() as flag:
            os.kill(os.getpid(), signal.SIGTERM)
            assert flag.signal_name == "SIGTERM"
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
