"""Replicas of several processes that shard their weights (HSDP): a lost process costs its replica, and the rest a step.

A failpoint kills one process wherever the step protocol is; the result must be that of a replica that nobody disturbed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.core import failpoints
from keepstep.core.errors import ConfigError, UsageError
from keepstep.resilience.agent import AgentSettings
from keepstep.resilience.agent import run_processes as run_processes_of_agent
from keepstep.resilience.workers import Task
from tests.train.test_survive import SURVIVE, events, workers
from tests.train.tiny_runs import BackgroundRun, committed_steps, held_until, losses, run_processes

STEPS = 60
SHARDED = [*SURVIVE, "parallel.shard=2", "parallel.replicate=-1", f"max_duration={STEPS}ba"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one replica of two processes."""
    root = tmp_path_factory.mktemp("alone")
    done = run_processes(root, 2, *SHARDED)
    assert done.returncode == 0, done.stderr
    assert not events(root, "joined")
    return losses(root)


def start(tmp_path: Path, failpoint: str, *words: str) -> BackgroundRun:
    """Two replicas of two processes; the first process that reaches the failpoint is killed. Steps wait for `check`."""
    mark = {failpoints.MARK_VARIABLE: str(tmp_path / "mark")}
    environment = {failpoints.VARIABLE: failpoint, **mark, **held_until(tmp_path / "seen")}
    return BackgroundRun(tmp_path / "run", 4, *SHARDED, *words, output=tmp_path / "output", environment=environment)


def check(tmp_path: Path, run: BackgroundRun, undisturbed: list[float]) -> None:
    (tmp_path / "seen").touch()
    assert run.end() == 0, run.output
    assert (tmp_path / "mark").exists()
    assert losses(tmp_path / "run") == undisturbed
    assert committed_steps(tmp_path / "run") == [STEPS]
    assert not events(tmp_path / "run", "restart")


@pytest.mark.slow
def test_lost_process_takes_its_replica_alone_also_while_it_joins(tmp_path: Path, undisturbed: list[float]) -> None:
    # The replacement is killed when it has applied its first step, and is replaced in its turn.
    run = start(tmp_path, "replayed:1")
    root = tmp_path / "run"

    def is_back() -> bool:
        joined = [event["replica"] for event in events(root, "joined")]
        return (tmp_path / "mark").exists() and len(joined) == len(events(root, "left")) > 0

    run.wait_for("step 1/")
    before = workers(run)
    leader = next(int(event["rank"]) for event in events(root, "start")) // 2
    # Not the process that writes for all, but the other one of its replica.
    os.kill(before[2 * leader + 1], signal.SIGKILL)
    run.wait_until(is_back)
    after = workers(run)
    kept = 1 - leader
    assert {rank: pid for rank, pid in after.items() if rank // 2 == kept} == {
        rank: pid for rank, pid in before.items() if rank // 2 == kept
    }
    assert not {after[2 * leader], after[2 * leader + 1]} & set(before.values())
    check(tmp_path, run, undisturbed)
    assert {event["replica"] for event in events(root, "left")} == {leader}


@pytest.mark.parametrize("failpoint", ["sum_half:3", pytest.param("committed:3", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_process_killed_in_the_exchange_or_after_the_commit(
    tmp_path: Path, undisturbed: list[float], failpoint: str
) -> None:
    run = start(tmp_path, failpoint)
    check(tmp_path, run, undisturbed)
    assert len(events(tmp_path / "run", "left")) == 1


def test_replicas_need_a_micro_batch_for_each_of_their_processes() -> None:
    words = ["resilience.survive=true", "parallel.shard=3", "parallel.replicate=-1", "global_batch=8", "microbatch=1"]
    config = load_config(None, words).config
    with pytest.raises(ConfigError, match="multiple of microbatch"):
        check_layout(config, 6)


def test_node_has_whole_replicas() -> None:
    with pytest.raises(UsageError, match="no whole number of replicas"):
        run_processes_of_agent(Task(len, []), 3, settings=AgentSettings(replica_size=2))
