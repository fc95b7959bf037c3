"""A container that outlives its attempts: which exit codes run again, which wait, and what a stop request does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.launch.pod import ENDED
from tests.launch.manifests import REPOSITORY
from tests.patience import PATIENCE_S

ATTEMPT = """\
import pathlib, signal, sys
log = pathlib.Path(sys.argv[1])
with log.open("a") as file:
    file.write("x")
codes = [int(word) for word in sys.argv[2].split(",")]
code = codes[min(log.stat().st_size, len(codes)) - 1]
if code < 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(-code))
    print("waits", file=sys.stderr, flush=True)
    signal.pause()
sys.exit(code)
"""
SUPERVISOR = """\
import sys
from keepstep.launch.pod import supervise
retries = None if sys.argv[1] == "none" else int(sys.argv[1])
sys.exit(supervise([sys.executable, *sys.argv[2:]], retries))
"""


def start(folder: Path, retries: int | None, codes: str) -> subprocess.Popen[str]:
    (folder / "attempt.py").write_text(ATTEMPT)
    words = ["none" if retries is None else str(retries), str(folder / "attempt.py"), str(folder / "log"), codes]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", SUPERVISOR, *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_line(pod: subprocess.Popen[str], text: str) -> None:
    assert pod.stderr is not None
    for line in pod.stderr:
        if text in line:
            return
    pytest.fail(f"the pod ended without {text!r}")


def attempts(folder: Path) -> int:
    return (folder / "log").stat().st_size


@pytest.mark.parametrize(("codes", "code", "count"), [("75,75,0", 0, 3), ("75,4", 4, 2), ("5", 5, 1), ("130", 1, 1)])
def test_volcano_pod_ends_with_the_code_that_its_policies_know(
    codes: str, code: int, count: int, tmp_path: Path
) -> None:
    pod = start(tmp_path, None, codes)
    pod.communicate(timeout=PATIENCE_S)
    assert (pod.returncode, attempts(tmp_path)) == (code, count)


@pytest.mark.parametrize(
    ("codes", "ended", "count"), [("75,0", 0, 2), ("2", 2, 1), ("4", 4, 1), ("5,75,1,5", 5, 4), ("1,0", 0, 2)]
)
def test_leaderworkerset_pod_waits_after_the_run_ended(codes: str, ended: int, count: int, tmp_path: Path) -> None:
    pod = start(tmp_path, 2, codes)
    wait_for_line(pod, f"{ENDED} {ended}")
    assert attempts(tmp_path) == count
    assert pod.poll() is None
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=PATIENCE_S)
    assert pod.returncode == ended


@pytest.mark.parametrize("retries", [None, 3])
def test_stop_request_reaches_the_attempt_and_ends_the_pod(retries: int | None, tmp_path: Path) -> None:
    pod = start(tmp_path, retries, "-75")
    wait_for_line(pod, "waits")
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=PATIENCE_S)
    assert (pod.returncode, attempts(tmp_path)) == (75, 1)
