"""One training at a time in a folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.core.errors import RunTakenError, StopRequested
from keepstep.resilience.alone import alone_in
from keepstep.resilience.causes import classify

HOLD = """
import sys
from pathlib import Path
from keepstep.resilience.alone import alone_in
with alone_in(Path(sys.argv[1]), lambda: False):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_training_in_a_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        with (
            pytest.raises(RunTakenError, match=f"process {other.pid} trains in"),
            alone_in(tmp_path, lambda: False, wait_s=0.3),
        ):
            pass
        # By another name it is the same folder.
        (tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
        with (
            pytest.raises(RunTakenError),
            alone_in(tmp_path.parent / f"{tmp_path.name}-link", lambda: False, wait_s=0),
        ):
            pass


def test_a_folder_is_free_when_its_holder_ends_however_that_was(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        other.kill()
        with alone_in(tmp_path, lambda: False):
            pass
    with alone_in(tmp_path, lambda: False, wait_s=0):
        pass


def test_a_request_to_stop_ends_the_wait(tmp_path: Path) -> None:
    with holder(tmp_path), pytest.raises(StopRequested), alone_in(tmp_path, lambda: True):
        pass


def test_it_is_no_fault_of_the_run_that_holds_the_folder() -> None:
    assert classify(RunTakenError("process 1 trains in runs/a already")) == "taken"
