"""SIGTERM and SIGHUP end a command as Ctrl-C does: nothing that it started goes on without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from keepstep.core.interrupts import termination_as_interrupt
from tests.patience import PATIENCE_S

VERB = """
import multiprocessing, subprocess, time

def add_arguments(parser):
    pass

def nap(started):
    started.send(True)
    time.sleep(60)

def run(args):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    forked = context.Process(target=nap, args=(theirs,))
    forked.start()
    ours.recv()
    forked.terminate()
    forked.join()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        print(forked.exitcode, child.pid, flush=True)
        time.sleep(60)
    finally:
        child.kill()
        child.wait()
"""
PROGRAM = "import sys; from keepstep.cli import main; main.VERBS['nap'] = ('nap', 'nap'); sys.exit(main.main(['nap']))"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_a_command_started_ends_with_it(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "nap.py").write_text(VERB)
    paths = os.pathsep.join(str(path) for path in (tmp_path, *sys.path) if path)
    # Whoever runs the tests may do so under nohup.
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {PROGRAM}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        forked_code, child = map(int, process.stdout.readline().split())
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert forked_code == -signal.SIGTERM, "a process forked from the command ends at once when it is told to"
    assert (process.returncode, said) == (
        128 + number,
        "interrupted\n" if number == signal.SIGINT else f"ended by {number.name}\n",
    )
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_command_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "nap.py").write_text(VERB)
    paths = os.pathsep.join(str(path) for path in (tmp_path, *sys.path) if path)
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PROGRAM}"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_stumbles_over_an_interrupt_was_interrupted(number: signal.Signals) -> None:
    def stumble() -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        raise RecursionError("a library that is half imported")

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        stumble()
    assert signal.getsignal(number) is before


TOLD_TWICE = """
import atexit, os, signal, sys

def add_arguments(parser):
    parser.add_argument("number", type=int)

def run(args):
    atexit.register(lambda: (os.kill(os.getpid(), args.number), print("ended", flush=True)))
    try:
        os.kill(os.getpid(), args.number)
    finally:
        os.kill(os.getpid(), args.number)
        print("cleared away", flush=True)
"""
OWN_PROCESS = "import sys; from keepstep.cli import main; main.VERBS['nap'] = ('nap', 'nap'); sys.exit(main.main())"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_that_a_wrapper_passes_on_again_cuts_short_nothing(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "nap.py").write_text(TOLD_TWICE)
    paths = os.pathsep.join(str(path) for path in (tmp_path, *sys.path) if path)
    done = subprocess.run(
        [sys.executable, "-c", OWN_PROCESS, "nap", str(int(number))],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    said = "interrupted\n" if number == signal.SIGINT else f"ended by {number.name}\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "cleared away\nended\n", said)


def test_whoever_presses_ctrl_c_again_and_again_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("keepstep.core.interrupts.time.monotonic", lambda: now)
    heard = 0
    with termination_as_interrupt():
        for _ in range(10):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                heard += 1
            now += 0.4
    assert heard == 4, "at 0, 1.2, 2.4 and 3.6 seconds"


def test_one_of_many_ends_as_its_run_did_whatever_libraries_do_as_python_ends(tmp_path: Path) -> None:
    verb = "import atexit, os\ndef add_arguments(parser): pass\ndef run(args): atexit.register(os.abort); return 75\n"
    (tmp_path / "nap.py").write_text(verb)
    paths = os.pathsep.join(str(path) for path in (tmp_path, *sys.path) if path)
    environment = {**os.environ, "PYTHONPATH": paths, "RANK": "0", "WORLD_SIZE": "1"}
    assert subprocess.run([sys.executable, "-c", OWN_PROCESS, "nap"], env=environment).returncode == 75


def test_ctrl_c_while_python_exits_changes_no_exit_code() -> None:
    code = """if True:
        import os, signal
        from keepstep.core.interrupts import termination_as_interrupt
        with termination_as_interrupt(until_exit=True):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(75)
    """
    # The parent may ignore SIGINT, and a child inherits that.
    started = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    assert subprocess.run([sys.executable, "-c", started], check=False, timeout=PATIENCE_S).returncode == 75
