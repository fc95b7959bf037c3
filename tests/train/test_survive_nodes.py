"""A lost node costs the replicas of the other node one step; its replacement joins them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.chaos.experiment import kill_session, session_members, wait_for_event, wait_for_step
from keepstep.core import proc
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.observe.run_folder import RunFolder
from tests.patience import PATIENCE_S
from tests.resilience.test_rendezvous import free_port
from tests.train.test_survive import SURVIVE, WORDS, events
from tests.train.tiny_runs import TINY, committed_steps, losses, run_here

pytestmark = pytest.mark.slow
STEPS = 200
LENGTH = f"max_duration={STEPS}ba"


@contextmanager
def node(number: int, port: int, root: Path, processes: int = 1, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of one of two nodes."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_HEAD": "127.0.0.1", "KEEPSTEP_PORT": str(port),
        "PET_NODE_RANK": str(number), RENDEZVOUS_SECRET: "known to both nodes alone",
    }  # fmt: skip
    launch = ["launch", "node", "--nodes", "2", "--processes", str(processes), "--max-restarts", "3", "--", "train"]
    words = [*launch, *TINY, f"runs_dir={root}", *SURVIVE, LENGTH, *more]
    with (root.parent / f"node-{number}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "keepstep", *words], env=environment, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def test_lost_node_is_replaced_while_the_other_one_trains(tmp_path: Path) -> None:
    root, port = tmp_path / "survive", free_port()
    folder = RunFolder(root / "run")
    with node(0, port, root) as first:
        with node(1, port, root):
            assert wait_for_step(folder, 3, PATIENCE_S), (tmp_path / "node-0.log").read_text()
        # Now all processes of the second node are gone.
        assert wait_for_event(folder, "left", PATIENCE_S), (tmp_path / "node-0.log").read_text()
        with node(1, port, root) as second:
            assert wait_for_event(folder, "joined", PATIENCE_S), (tmp_path / "node-1.log").read_text()
            assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    run_here(tmp_path / "alone", *WORDS, LENGTH)
    assert losses(root) == losses(tmp_path / "alone")
    assert committed_steps(root) == [STEPS]
    assert not events(root, "restart") + events(root, "resume")
    assert [event["replica"] for event in events(root, "left")] == [1]


def test_process_of_another_node_is_replaced_alone(tmp_path: Path) -> None:
    root, port = tmp_path / "survive", free_port()
    folder = RunFolder(root / "run")

    def replicas(agent: subprocess.Popen[bytes]) -> dict[str, int]:
        names = {proc.name(pid): pid for pid in session_members(agent.pid)}
        return {name: pid for name, pid in names.items() if name in ("keepstep r2", "keepstep r3")}

    with node(0, port, root, 2) as first, node(1, port, root, 2) as second:
        assert wait_for_step(folder, 3, PATIENCE_S), (tmp_path / "node-0.log").read_text()
        before = replicas(second)
        os.kill(before["keepstep r3"], signal.SIGKILL)
        assert wait_for_event(folder, "joined", PATIENCE_S), (tmp_path / "node-1.log").read_text()
        after = replicas(second)
        assert after["keepstep r2"] == before["keepstep r2"]
        assert after["keepstep r3"] != before["keepstep r3"]
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    assert [event["replica"] for event in events(root, "left")] == [3]


def test_lost_first_node_started_again_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    root, port, short = tmp_path / "survive", free_port(), ["max_duration=40ba", "checkpoint.interval=5ba"]
    folder = RunFolder(root / "run")
    with node(1, port, root, 1, *short) as second:
        with node(0, port, root, 1, *short):
            assert wait_for_event(folder, "checkpoint_committed", PATIENCE_S), (tmp_path / "node-0.log").read_text()
        # The other node cannot commit a step alone, and waits.
        steps = len(losses(root))
        with node(0, port, root, 1, *short) as again:
            assert wait_for_event(folder, "resume", PATIENCE_S), (tmp_path / "node-0.log").read_text()
            assert (again.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    assert events(root, "resume")[0]["step"] <= steps < 40
    run_here(tmp_path / "alone", *WORDS, *short)
    assert losses(root) == losses(tmp_path / "alone")
