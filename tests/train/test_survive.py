"""A lost replica costs the others one step: they keep their processes, and the losses do not change."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load_config
from keepstep.core import proc
from keepstep.core.errors import ConfigError
from tests.train.tiny_runs import BackgroundRun, committed_steps, held_until, losses, run_here

STEPS = 60
WORDS = ["reproducible=elastic", "microbatch=1", f"max_duration={STEPS}ba", "checkpoint.interval=1000ba"]
SURVIVE = [*WORDS, "resilience.survive=true", "resilience.snapshot_interval=0"]


def workers(run: BackgroundRun) -> dict[int, int]:
    """Process id of each replica."""
    found = {}
    for process in proc.processes():
        if process.group == process.pid and _belongs(process.pid, run.process.pid):
            name = re.match(r"keepstep r(\d+)", Path(f"/proc/{process.pid}/comm").read_text())
            found.update({int(name[1]): process.pid} if name else {})
    return found


def _belongs(pid: int, agent: int) -> bool:
    while pid > 1 and pid != agent:
        status = proc.status(pid)
        pid = status.parent if status is not None else 0
    return pid == agent


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    lines = (root / "run" / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.slow
def test_survivors_keep_their_processes_and_the_losses_their_bits(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    run = BackgroundRun(tmp_path / "survive", 3, *SURVIVE, output=tmp_path / "output", environment=held_until(seen))
    run.wait_for("step 1/")
    before = workers(run)
    leader = next(int(event["rank"]) for event in events(tmp_path / "survive", "start"))
    # The one that writes for all, and one that only stops.
    os.kill(before[leader], signal.SIGKILL)
    run.wait_for(f"replica {leader} joined")
    stopped = next(number for number in before if number != leader)
    os.kill(before[stopped], signal.SIGSTOP)
    run.wait_for(f"replica {stopped} joined")
    kept = next(number for number in before if number not in (leader, stopped))
    assert workers(run)[kept] == before[kept]
    seen.touch()
    assert run.end() == 0, run.output
    run_here(tmp_path / "alone", *WORDS)
    assert losses(tmp_path / "survive") == losses(tmp_path / "alone")
    assert committed_steps(tmp_path / "survive") == [STEPS]
    assert not events(tmp_path / "survive", "restart")
    assert [event["replica"] for event in events(tmp_path / "survive", "left")] == [leader, stopped]


@pytest.mark.slow
def test_spare_takes_the_place_of_a_lost_replica(tmp_path: Path) -> None:
    # In the default mode: with one thread even the bits are those of an elastic run, so the samples are.
    words = [*SURVIVE, "reproducible=resume", "max_duration=150ba", "--spares", "1"]
    seen = tmp_path / "seen"
    run = BackgroundRun(tmp_path / "survive", 2, *words, output=tmp_path / "output", environment=held_until(seen))
    root, before = tmp_path / "survive", dict[int, int]()

    def ready_spare(count: int) -> int:
        run.wait_until(lambda: len(events(root, "spare_ready")) == count)
        before.update(workers(run))
        return int(events(root, "spare_ready")[-1]["replica"])

    run.wait_for("step 1/")
    spare = ready_spare(1)
    lost = next(number for number in before if number != spare)
    os.kill(before[lost], signal.SIGKILL)
    run.wait_for(f"replica {spare} joined")
    # It had been there all along: nobody waited for a new process.
    assert workers(run)[spare] == before[spare]
    # The process behind it is a spare in its turn, and its loss disturbs nobody.
    assert ready_spare(2) == lost
    os.kill(before[lost], signal.SIGSTOP)
    assert ready_spare(3) == lost
    assert [event["replica"] for event in events(root, "spare_lost")] == [lost]
    seen.touch()
    assert run.end() == 0, run.output
    run_here(tmp_path / "alone", *WORDS, "max_duration=150ba")
    assert losses(root) == losses(tmp_path / "alone")
    assert [event["replica"] for event in events(root, "left")] == [lost]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["resilience.spares=1"], "resilience.survive=true"),
        (["resilience.survive=true", "parallel.tensor=2"], "parallel.tensor=1"),
        (["resilience.survive=true", "parallel.shard=2", "parallel.tensor=2"], "parallel.tensor=1"),
        (["resilience.survive=true", "resilience.exchange=nccl", "compute.device=cpu"], "resilience.exchange=host"),
        (["resilience.survive=true", "rl.method=grpo"], "resilience.survive=false"),
    ],
)
def test_survive_refuses_what_it_cannot_keep(words: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert hint in "\n".join(caught.value.lines())
