"""Storage that refuses writes: a quota that is used up, and a file system that becomes read-only and writable again."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from keepstep.core.errors import EXIT_STOPPED, EXIT_STORAGE_FULL
from tests.small_disk import small_disk
from tests.train.tiny_runs import BackgroundRun, committed_steps

pytestmark = pytest.mark.slow

REFUSE = '''
import os, sys

NUMBER, SWITCH, BELOW = int(os.environ["REFUSE_ERRNO"]), os.environ["REFUSE_SWITCH"], os.environ["REFUSE_BELOW"]


def refuse(event, arguments):
    """Fail like the system call, in every process of the run, as long as the switch exists."""
    if event not in ("open", "os.mkdir", "os.link", "os.rename") or not isinstance(arguments[0], (str, os.PathLike)):
        return
    flags = arguments[2] if event == "open" else os.O_CREAT
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    path = os.fspath(arguments[0])
    if writes and isinstance(path, str) and path.startswith(BELOW) and os.path.exists(SWITCH):
        raise OSError(NUMBER, os.strerror(NUMBER), path)


sys.addaudithook(refuse)
'''
"""A sitecustomize.py: quotas need a kernel with them and a user other than root."""

REMEDIES = {errno.EDQUOT: "free some space in your quota", errno.EROFS: "mount it writable again"}


class RefusedRun(BackgroundRun):
    """A run whose steps cannot be written while `switch` exists."""

    def __init__(self, folder: Path, number: int, below: Path, *overrides: str) -> None:
        self.switch = folder / "switch"
        self.switch.touch()
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(REFUSE)
        paths = [str(folder / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {"REFUSE_ERRNO": str(number), "REFUSE_SWITCH": str(self.switch), "REFUSE_BELOW": str(below)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        super().__init__(folder, 1, *overrides, output=folder / "output.txt", environment=environment)


@pytest.mark.parametrize("number", REMEDIES, ids=["quota", "read-only"])
def test_refused_saves_are_retried_until_they_succeed(tmp_path: Path, number: int) -> None:
    below = tmp_path / "run" / "checkpoints" / "step_"
    run = RefusedRun(tmp_path, number, below, "max_duration=4ba", "checkpoint.interval=2ba")
    run.wait_until(lambda: "retrying for" in run.output, 600)
    run.wait_until(lambda: REMEDIES[number] in run.output, 600)
    assert "keepstep ckpt rescue" in run.output
    assert ("is at the limit of its quota" if number == errno.EDQUOT else "Read-only file system") in run.output
    assert committed_steps(tmp_path) == []
    run.switch.unlink()
    assert run.end() == 0, run.output
    assert committed_steps(tmp_path) == [4]
    assert "Traceback" not in run.output


def test_quota_to_the_end_fails_with_a_remedy(tmp_path: Path) -> None:
    below = tmp_path / "run" / "checkpoints" / "step_"
    words = ["max_duration=2ba", "checkpoint.interval=2ba", "checkpoint.retry_s=1", "resilience.max_restarts=0"]
    run = RefusedRun(tmp_path, errno.EDQUOT, below, *words)
    assert run.end() == EXIT_STORAGE_FULL, run.output
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "step 2 is not committed" in error
    assert REMEDIES[errno.EDQUOT] in run.output
    assert "Traceback" not in run.output


def test_run_survives_a_read_only_remount(tmp_path: Path) -> None:
    """A real one, of the file system with the checkpoints."""
    with small_disk(tmp_path / "disk", 64) as disk:
        words = ["max_duration=100000ba", "checkpoint.interval=2ba", "checkpoint.asynchronous=false"]
        words += [f"checkpoint.folder={disk.folder}/steps", "checkpoint.keep=2"]
        run = BackgroundRun(tmp_path, 1, *words, output=tmp_path / "output.txt")
        run.wait_until(lambda: newest(disk.folder) > 0, 600)
        remount(disk.folder, "ro")
        run.wait_until(lambda: "Read-only file system" in events(tmp_path), 600)
        before = newest(disk.folder)
        remount(disk.folder, "rw")
        run.wait_until(lambda: newest(disk.folder) > before, 600)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == EXIT_STOPPED, run.output
        assert "this save is skipped, training continues" in run.output
        assert "Traceback" not in run.output


def newest(disk: Path) -> int:
    """The newest committed step; 0 when there is none."""
    return max((int(marker.parent.name[5:].split(".")[0]) for marker in disk.glob("steps/step_*/_SUCCESS")), default=0)


def events(root: Path) -> str:
    """Messages of failed saves."""
    lines = map(json.loads, (root / "run" / "events.jsonl").read_text().splitlines())
    return "\n".join(line["message"] for line in lines if line.get("reason") == "checkpoint_failed")


def remount(folder: Path, mode: str) -> None:
    """Again while a file is open for writing."""
    deadline = time.monotonic() + 600
    while subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.005)
