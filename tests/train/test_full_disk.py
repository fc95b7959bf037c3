"""A full disk: the run waits, continues by itself when there is room, or fails and says what is missing."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.errors import EXIT_STOPPED, EXIT_STORAGE_FULL
from keepstep.resilience.fault_injection import Fault, to_environment
from tests.patience import PATIENCE_S
from tests.small_disk import SmallDisk, small_disk
from tests.train.tiny_runs import BackgroundRun, committed_steps, losses, run_processes

pytestmark = pytest.mark.slow

DISK_MEGABYTES = 48
Undisturbed = Callable[[int, int], list[float]]

LINES = 20
"""All that a run may print about a full disk."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK_MEGABYTES) as mounted:
        yield mounted


@pytest.fixture
def disk(small: SmallDisk) -> Path:
    return small.folder


class Run(BackgroundRun):
    """A run on a small disk, which must not print much."""

    def __init__(
        self, disk: Path, tmp_path: Path, processes: int, *overrides: str, faults: Sequence[Fault] = ()
    ) -> None:
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        environment = to_environment(faults, marks) if faults else {}
        super().__init__(disk, processes, *overrides, output=tmp_path / "output.txt", environment=environment)

    def end(self) -> int:
        code = super().end()
        assert "Traceback" not in self.output, self.output
        assert len(self.output.splitlines()) <= LINES, self.output
        return code


def events(disk: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (disk / "run" / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses of a run on a large disk, by processes and steps; every case is trained once."""

    @functools.cache
    def train(processes: int, steps: int) -> list[float]:
        root = tmp_path_factory.mktemp("undisturbed")
        done = run_processes(root, processes, f"max_duration={steps}ba")
        assert done.returncode == 0, done.stderr
        return losses(root)

    return train


@pytest.mark.parametrize("processes", [1, 2])
def test_full_disk_before_the_run_is_waited_for(
    small: SmallDisk, disk: Path, tmp_path: Path, processes: int, undisturbed: Undisturbed
) -> None:
    words = ["max_duration=6ba", "checkpoint.interval=3ba"]
    small.fill()
    run = Run(disk, tmp_path, processes, *words)
    run.wait_for("cannot be written: No space left on device; waiting")
    small.empty()
    assert run.end() == 0, run.output
    assert committed_steps(disk) == [3, 6]
    assert losses(disk) == undisturbed(processes, 6)


@pytest.mark.parametrize("restarts", [0, 8], ids=["alone", "under the agent"])
def test_full_disk_before_the_run_fails_once(small: SmallDisk, tmp_path: Path, restarts: int) -> None:
    small.fill()
    run = Run(small.folder, tmp_path, 1, "checkpoint.retry_s=2", f"resilience.max_restarts={restarts}")
    assert run.end() == EXIT_STORAGE_FULL
    assert run.output.count("error: ") == 1, run.output
    assert " hint: free some space" in run.output


# Every pair of values: steps that are a multiple of the interval or none, one or two processes, and a setting.
PAIRS = [(1, 8, "true"), (1, 7, "false"), (2, 8, "false"), (2, 7, "true")]


@pytest.mark.parametrize(("processes", "steps", "asynchronous"), PAIRS)
def test_full_disk_at_the_end_is_waited_for(
    small: SmallDisk,
    disk: Path,
    tmp_path: Path,
    processes: int,
    steps: int,
    asynchronous: str,
    undisturbed: Undisturbed,
) -> None:
    """Saves in the middle are skipped and counted; the last one is retried until it succeeds."""
    words = [f"max_duration={steps}ba", "checkpoint.interval=2ba", f"checkpoint.asynchronous={asynchronous}"]
    words += ["checkpoint.keep=0", "evaluate.at_end=false"]
    full = Fault("full", 3, facts={"folder": str(disk), "steps": 1000})
    run = Run(disk, tmp_path, processes, *words, faults=(full,))
    run.wait_for("keepstep ckpt rescue")
    assert "retrying for" in run.output
    # On a busy machine the disk may be full before the save behind training is done.
    before = committed_steps(disk)
    assert before in ([2], [] if asynchronous == "true" else [2])
    small.empty()
    assert run.end() == 0, run.output
    assert committed_steps(disk) == [*before, steps]
    assert losses(disk) == undisturbed(processes, steps)
    skipped = [event["step"] for event in events(disk, "warning") if event.get("reason") == "checkpoint_failed"]
    assert {4, 6} <= set(skipped)
    assert [event["skipped_saves"] for event in events(disk, "finish")] == [3 - len(before)]
    assert run.output.count("this save is skipped") == 1


@pytest.mark.parametrize(("processes", "steps", "at_end"), PAIRS)
def test_full_disk_to_the_end_fails(
    small: SmallDisk, disk: Path, tmp_path: Path, processes: int, steps: int, at_end: str, undisturbed: Undisturbed
) -> None:
    words = [
        f"max_duration={steps}ba",
        "checkpoint.interval=2ba",
        "checkpoint.asynchronous=false",
        "checkpoint.retry_s=2",
        f"checkpoint.at_end={at_end}",
    ]
    full = Fault("full", 3, facts={"folder": str(disk), "steps": 1000})
    run = Run(disk, tmp_path, processes, *words, faults=(full,))
    assert run.end() == EXIT_STORAGE_FULL, run.output
    assert "done:" not in run.output
    assert committed_steps(disk) == [2]
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert f"step {steps} is not committed" in error
    assert "a save needs 16" in error
    assert "the newest checkpoint is step 2" in error
    assert f"keepstep train {disk}/run/config.yaml" in run.output

    # The command of the hint continues once there is room.
    small.empty()
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "train", f"{disk}/run/config.yaml", "--procs", str(processes)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert committed_steps(disk)[-1] == (steps if at_end == "true" else steps // 2 * 2)
    assert losses(disk) == undisturbed(processes, steps)


@pytest.mark.parametrize("processes", [1, 2])
def test_full_disk_in_the_middle_is_survived(
    disk: Path, tmp_path: Path, processes: int, undisturbed: Undisturbed
) -> None:
    words = ["max_duration=10ba", "checkpoint.interval=2ba", "checkpoint.keep=0", "checkpoint.asynchronous=false"]
    full = Fault("full", 3, facts={"folder": str(disk), "steps": 4})
    run = Run(disk, tmp_path, processes, *words, faults=(full,))
    assert run.end() == 0, run.output
    assert committed_steps(disk) == [2, 8, 10]
    assert losses(disk) == undisturbed(processes, 10)
    assert [event["skipped_saves"] for event in events(disk, "finish")] == [2]


def test_stop_with_a_full_disk_says_that_nothing_is_saved(small: SmallDisk, disk: Path, tmp_path: Path) -> None:
    words = ["max_duration=100000ba", "checkpoint.interval=0ba", "checkpoint.retry_s=2"]
    full = Fault("full", 3, facts={"folder": str(disk), "steps": 1000000})
    run = Run(disk, tmp_path, 1, *words, faults=(full,))
    run.wait_until(lambda: small.balloon.exists())
    time.sleep(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == EXIT_STOPPED, run.output
    assert "stopped on request, but without a save" in run.output
    assert committed_steps(disk) == []
