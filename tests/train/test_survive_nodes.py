"""A lost node costs the replicas of the other node one step; its replacement joins them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from keepstep.chaos.experiment import kill_session, session_members, wait_for_event, wait_for_step
from keepstep.core import proc
from keepstep.core.errors import EXIT_STOPPED
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.observe.run_folder import RunFolder
from tests.patience import PATIENCE_S
from tests.resilience.test_rendezvous import free_port
from tests.train.test_survive import SURVIVE, WORDS, events
from tests.train.tiny_runs import TINY, committed_steps, held_until, losses, run_here

pytestmark = pytest.mark.slow
STEPS = 200
LENGTH = f"max_duration={STEPS}ba"


IMPATIENT = """
import sys
from dataclasses import replace
from keepstep.cli.main import main
from keepstep.core import ranks
usual = ranks.group_from_environment
ranks.group_from_environment = lambda *words: replace(usual(*words), join_timeout_s=1)
sys.exit(main(sys.argv[1:]))
"""
"""The command line, with a short wait for nodes."""


def wait_until(condition: Callable[[], bool], agent: subprocess.Popen[bytes]) -> None:
    """While the agent's run lasts."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert agent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def node(
    number: int,
    port: int,
    root: Path,
    processes: int = 1,
    *more: str,
    nodes: str = "2",
    command: Sequence[str] = ("-m", "keepstep"),
) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of one of several nodes."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_HEAD": "127.0.0.1", "KEEPSTEP_PORT": str(port),
        "PET_NODE_RANK": str(number), RENDEZVOUS_SECRET: "known to both nodes alone",
    }  # fmt: skip
    launch = ["launch", "node", "--nodes", nodes, "--processes", str(processes), "--max-restarts", "3", "--", "train"]
    words = [*launch, *TINY, f"runs_dir={root}", *SURVIVE, LENGTH, *more]
    with (root.parent / f"node-{number}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *command, *words], env=environment, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the steps of runs started from here wait until the function is called that this returns."""
    seen = tmp_path / "seen"
    for name, value in held_until(seen).items():
        monkeypatch.setenv(name, value)

    def release() -> None:
        seen.touch()
        monkeypatch.undo()

    return release


def test_lost_node_is_replaced_while_the_other_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, port = tmp_path / "survive", free_port()
    folder, release = RunFolder(root / "run"), hold(tmp_path, monkeypatch)
    with node(0, port, root) as first:
        with node(1, port, root):
            assert wait_for_step(folder, 3, PATIENCE_S), (tmp_path / "node-0.log").read_text()
        # Now all processes of the second node are gone.
        assert wait_for_event(folder, "left", PATIENCE_S), (tmp_path / "node-0.log").read_text()
        with node(1, port, root) as second:
            assert wait_for_event(folder, "joined", PATIENCE_S), (tmp_path / "node-1.log").read_text()
            release()
            assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    run_here(tmp_path / "alone", *WORDS, LENGTH)
    assert losses(root) == losses(tmp_path / "alone")
    assert committed_steps(root) == [STEPS]
    assert not events(root, "restart") + events(root, "resume")
    assert [event["replica"] for event in events(root, "left")] == [1]


def test_process_of_another_node_is_replaced_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, port = tmp_path / "survive", free_port()
    folder, release = RunFolder(root / "run"), hold(tmp_path, monkeypatch)

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
        release()
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    assert [event["replica"] for event in events(root, "left")] == [3]


@pytest.mark.parametrize(
    ("words", "event", "source"),
    [
        (["checkpoint.interval=5ba"], "checkpoint_committed", "step_"),
        # The other node's memory outlives its processes.
        (["resilience.snapshot_interval=1"], "start", "memory"),
    ],
)
def test_lost_first_node_started_again_resumes(
    tmp_path: Path, words: list[str], event: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, port, short = tmp_path / "survive", free_port(), ["max_duration=40ba", *words]
    folder, release = RunFolder(root / "run"), hold(tmp_path, monkeypatch)
    with node(1, port, root, 1, *short) as second:
        with node(0, port, root, 1, *short):
            assert wait_for_event(folder, event, PATIENCE_S), (tmp_path / "node-0.log").read_text()
            assert wait_for_step(folder, 5, PATIENCE_S), (tmp_path / "node-0.log").read_text()
        # The other node cannot commit a step alone, and waits.
        steps = len(losses(root))
        with node(0, port, root, 1, *short) as again:
            assert wait_for_event(folder, "resume", PATIENCE_S), (tmp_path / "node-0.log").read_text()
            release()
            assert (again.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    resumed = events(root, "resume")[0]
    assert resumed["folder"].startswith(source)
    # Lines of metrics are written a step later, or not at all in the step that was interrupted.
    assert steps < 40
    assert resumed["step"] >= steps if source == "memory" else resumed["step"] <= steps
    run_here(tmp_path / "alone", *WORDS, *short)
    assert losses(root) == losses(tmp_path / "alone")


@pytest.mark.parametrize("survive", [True, False])
def test_fewer_processes_resume_from_memory(tmp_path: Path, survive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes end, and one of two nodes does not come back."""
    root, port, steps = tmp_path / "survive", free_port(), 60
    folder, short = RunFolder(root / "run"), f"max_duration={steps}ba"
    words = [short, "resilience.snapshot_interval=1", f"resilience.survive={str(survive).lower()}"]
    release = hold(tmp_path, monkeypatch)

    def both_train() -> bool:
        """The second node joins survivors while they train. Without them the run starts with it, or starts again."""
        return bool(events(root, "joined")) or any(event["world_size"] == 2 for event in events(root, "start"))

    with node(0, port, root, 1, *words, nodes="1:2") as first:
        with node(1, port, root, 1, *words, nodes="1:2"):
            assert wait_for_step(folder, 1, PATIENCE_S), (tmp_path / "node-0.log").read_text()
            wait_until(both_train, first)
            assert wait_for_step(folder, len(losses(root)) + 3, PATIENCE_S), (tmp_path / "node-0.log").read_text()
            (worker,) = [pid for pid in session_members(first.pid) if proc.name(pid).startswith("keepstep r")]
            os.kill(worker, signal.SIGKILL)
        release()
        assert first.wait(PATIENCE_S) == 0, (tmp_path / "node-0.log").read_text()
    resumed = events(root, "resume")[-1]
    assert (resumed["folder"], steps > resumed["step"]) == ("memory", True)
    # A run that makes room for another node saves first; survivors have saved nothing.
    assert [step for step in committed_steps(root) if step > resumed["step"] or survive] == [steps]
    run_here(tmp_path / "alone", *WORDS, short)
    assert losses(root) == losses(tmp_path / "alone")


def test_nodes_join_and_leave_and_too_few_wait_with_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, port, steps = tmp_path / "survive", free_port(), 120
    folder, short = RunFolder(root / "run"), f"max_duration={steps}ba"

    def one_of(number: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return node(number, port, root, 1, short, nodes="2:3")

    release = hold(tmp_path, monkeypatch)
    with one_of(0) as first:
        with one_of(1):
            assert wait_for_step(folder, 3, PATIENCE_S), (tmp_path / "node-0.log").read_text()
            with one_of(2):
                assert wait_for_event(folder, "joined", PATIENCE_S), (tmp_path / "node-2.log").read_text()
            assert wait_for_event(folder, "left", PATIENCE_S), (tmp_path / "node-0.log").read_text()
            assert not events(root, "paused")
        assert wait_for_event(folder, "paused", PATIENCE_S), (tmp_path / "node-0.log").read_text()
        release()
        # Any number will do, as long as no other node has it.
        with one_of(7) as last:
            assert (first.wait(PATIENCE_S), last.wait(PATIENCE_S)) == (0, 0)
    run_here(tmp_path / "alone", *WORDS, short)
    assert losses(root) == losses(tmp_path / "alone")
    changes = [(event["replica"], event["ranks"]) for event in events(root, "joined") + events(root, "left")]
    assert changes == [(2, 3), (7, 2), (2, 2), (1, 1)]
    paused, joined = events(root, "paused")[0], events(root, "joined")[1]
    assert (paused["ranks"], paused["step"] + 1) == (1, joined["step"])
    assert not events(root, "restart") + events(root, "resume")


def test_too_few_nodes_save_and_stop_when_none_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, port = tmp_path / "survive", free_port()
    hold(tmp_path, monkeypatch)
    folder = RunFolder(root / "run")
    with node(0, port, root, nodes="2:3", command=["-c", IMPATIENT]) as first:
        with node(1, port, root, nodes="2:3"):
            assert wait_for_step(folder, 3, PATIENCE_S), (tmp_path / "node-0.log").read_text()
        assert first.wait(PATIENCE_S) == EXIT_STOPPED
    assert events(root, "paused")[0]["step"] <= committed_steps(root)[-1] == len(losses(root)) < STEPS
