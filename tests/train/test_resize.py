"""Nodes leave and join a run whose weights are sharded: it continues from memory, with the losses of a disk resume."""

from __future__ import annotations

import json
import subprocess
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.resilience.test_rendezvous import free_port
from tests.train.test_survive_nodes import node, wait_until
from tests.train.tiny_runs import held_until, losses
from tests.train.tiny_worlds import run_world

pytestmark = pytest.mark.slow
WORDS = [
    "resilience.survive=false", "reproducible=resume", "schedule.name=constant", "schedule.warmup=0ba",
    "global_batch=12", "microbatch=1", "model.dropout=0.1", "evaluate.at_end=false", "checkpoint.keep=0",
    "resilience.snapshot_interval=1",
]  # fmt: skip


@dataclass
class Attempt:
    """One start of all processes, and the state that it began with."""

    world_size: int
    first_step: int = 0
    source: str = ""


def attempts(root: Path) -> list[Attempt]:
    file, found = root / "run" / "events.jsonl", list[Attempt]()
    for event in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        if event["kind"] == "start":
            found.append(Attempt(event["world_size"]))
        elif event["kind"] == "resume":
            found[-1].first_step, found[-1].source = event["step"], event["folder"]
    return found


def has_trained(root: Path, world_size: int) -> bool:
    """Whether this many processes have done some steps."""
    *before, last = attempts(root) or [Attempt(0)]
    done = (root / "run" / "metrics.jsonl").exists() and len(losses(root)) > last.first_step + 3
    return done and last.world_size == world_size and bool(last.source or not before)


def disk_losses(root: Path, words: list[str], history: list[Attempt], steps: int) -> list[float]:
    """The losses of the same numbers of processes at the same steps, where each resumes from a checkpoint."""
    root.mkdir()
    ends = [attempt.first_step for attempt in history[1:]] + [steps]
    for attempt, end in zip(history, ends, strict=True):
        if end > attempt.first_step:
            codes = run_world(root, attempt.world_size, *words, f"max_duration={end}ba")
            assert not any(codes), (root / "said_0.txt").read_text()
    return losses(root)


@pytest.mark.parametrize(
    ("layout", "nodes", "steps"),
    [("parallel.shard=-1", 4, 150), ("parallel.shard=2 parallel.replicate=-1", 2, 60)],
    ids=["FSDP", "HSDP"],
)
def test_lost_nodes_and_a_new_one_continue_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, nodes: int, steps: int
) -> None:
    """Every second node is lost, and the others hold copies of its state. Four nodes get a new third one after that."""
    processes = 4 // nodes
    root, port, words = tmp_path / "nodes", free_port(), [*WORDS, *layout.split()]
    for name, value in held_until(seen := tmp_path / "seen").items():
        monkeypatch.setenv(name, value)

    def start(number: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        length = f"max_duration={steps}ba"
        return node(number, port, root, processes, *words, length, nodes=f"{nodes // 2}:{nodes}")

    with ExitStack() as left, ExitStack() as lost:
        agents = [(lost if number % 2 else left).enter_context(start(number)) for number in range(nodes)]
        wait_until(lambda: has_trained(root, nodes * processes), agents[0])
        lost.close()
        wait_until(lambda: has_trained(root, nodes * processes // 2), agents[0])
        if nodes == 4:
            left.enter_context(start(1))
            wait_until(lambda: has_trained(root, 3), agents[0])
        seen.touch()
        wait_until(lambda: '"finish"' in (root / "run" / "events.jsonl").read_text(), agents[0])
    monkeypatch.undo()
    history = attempts(root)
    assert [attempt.source for attempt in history if attempt.first_step] == ["memory"] * (len(history) - 1)
    assert losses(root) == disk_losses(tmp_path / "disk", words, history, steps)
