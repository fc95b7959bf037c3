"""One folder, two trainings in two network namespaces, and a paused holder: exactly one of them commits."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.protocol.lease import Candidate, decode, newest, this_process
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.core.errors import EXIT_HARDWARE, EXIT_STOPPED
from tests.train.tiny_runs import BackgroundRun, run_here

LONG = ["max_duration=1000000ba", "checkpoint.interval=50ba", "checkpoint.keep=0", "evaluate.at_end=false"]
ALONE = "resilience.max_restarts=0"
"""One process without an agent."""


def commits(root: Path) -> dict[str, int]:
    """The fencing number of every committed step."""
    found = {}
    for marker in (root / "run" / "checkpoints").glob("step_*/_SUCCESS"):
        manifest: dict[str, Any] = json.loads((marker.parent / json.loads(marker.read_text())["manifest"]).read_text())
        found[marker.parent.name] = manifest["fence"]
    return found


def holder_pid(root: Path) -> int:
    holder = decode(newest(LocalStore(root / "run"))[1])
    assert holder is not None
    return holder.pid


def own_network() -> list[str]:
    """A prefix for a command that gets a network namespace of its own."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("network namespaces need unshare and ip")
    for namespaces in ("-n", "-Urn"):
        prefix = ["unshare", namespaces, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if not subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
            return prefix
    pytest.skip("this machine allows no network namespaces")


@pytest.mark.slow
def test_second_training_from_another_network_namespace_is_refused(tmp_path: Path) -> None:
    prefix, words = own_network(), [*LONG, "resilience.lease_s=8"]
    first = BackgroundRun(tmp_path, 1, *words, ALONE, output=tmp_path / "first", prefix=prefix)
    try:
        first.wait_until(lambda: bool(commits(tmp_path)))
        second = BackgroundRun(tmp_path, 1, *words, output=tmp_path / "second", prefix=prefix)
        assert second.end() == EXIT_HARDWARE, second.output
        assert f"error: process {first.process.pid} on " in second.output
        assert "hint: stop the other run first" in second.output
        assert "Traceback" not in second.output
        first.process.send_signal(signal.SIGTERM)
    finally:
        assert first.end() == EXIT_STOPPED, first.output
    assert set(commits(tmp_path).values()) == {1}


@pytest.mark.slow
def test_paused_holder_wakes_up_and_leaves_without_a_commit(tmp_path: Path) -> None:
    prefix, words = own_network(), [*LONG, "resilience.lease_s=3", ALONE]
    first = BackgroundRun(tmp_path, 1, *words, output=tmp_path / "first", prefix=prefix)
    second = None
    try:
        first.wait_until(lambda: bool(commits(tmp_path)))
        first.process.send_signal(signal.SIGSTOP)
        second = BackgroundRun(tmp_path, 1, *words, output=tmp_path / "second", prefix=prefix)
        second.wait_until(lambda: 2 in commits(tmp_path).values())
        before = {name for name, fence in commits(tmp_path).items() if fence == 1}
        first.process.send_signal(signal.SIGCONT)
        assert first.end() == EXIT_HARDWARE, first.output
        assert f"error: process {second.process.pid} on " in first.output
        assert "has taken over" in first.output
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == EXIT_STOPPED, second.output
    finally:
        for run in (first, second):
            if run is not None:
                run.process.kill()
                run.process.wait()
    assert f"process {first.process.pid} on " in second.output, "the wait is announced"
    assert "taking over" in second.output
    after = commits(tmp_path)
    assert {name for name, fence in after.items() if fence == 1} == before
    assert not [name for name in after if "." in name], "no step was done twice"


@pytest.mark.slow
def test_killed_holder_of_this_machine_is_not_waited_for(tmp_path: Path) -> None:
    """The lease lasts an hour: whoever waited for its end would not finish here."""
    words = [*LONG, "resilience.lease_s=3600"]
    run = BackgroundRun(tmp_path, 1, *words, output=tmp_path / "first")
    try:
        run.wait_until(lambda: 1 in commits(tmp_path).values())
        # The agent starts another process.
        subprocess.run(["kill", "-KILL", str(holder_pid(tmp_path))], check=True)
        run.wait_until(lambda: 2 in commits(tmp_path).values())
        # So does the user, after the agent was killed as well. Its processes save first, and leave.
        run.process.kill()
        run.process.wait()
        again = BackgroundRun(tmp_path, 1, *words, output=tmp_path / "second")
        try:
            again.wait_until(lambda: 3 in commits(tmp_path).values())
            again.process.send_signal(signal.SIGTERM)
        finally:
            assert again.end() == EXIT_STOPPED, again.output
    finally:
        run.process.kill()
        run.process.wait()


@pytest.mark.slow
def test_run_waits_for_the_lease_of_a_lost_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A requeued job on another machine: nothing tells that the holder is dead but its silence."""
    lost = replace(this_process("job", 1.0), host="lost-host", boot="another boot")
    assert Candidate(str(tmp_path / "run"), lost).attempt(0.0) is not None
    run_here(tmp_path, "checkpoint.interval=3ba")
    assert commits(tmp_path) == {"step_00000003": 2, "step_00000006": 2}
    printed = capsys.readouterr().err
    assert "on lost-host trains in" in printed
    assert "gave no sign of life for 1 s: taking over" in printed


@pytest.mark.slow
def test_checkpoints_elsewhere_have_a_lease_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_here(tmp_path / name, f"checkpoint.folder={tmp_path / 'shared'}", "checkpoint.autoresume=false")
    number, content = newest(LocalStore(tmp_path / "shared"))
    holder = decode(content)
    assert holder is not None
    assert (number, holder.state) == (2, "released")
    assert newest(LocalStore(tmp_path / "a" / "run"))[0] == 1
