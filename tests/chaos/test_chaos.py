"""Fault scenarios on real processes: a short part of the suite here, all of it with `make chaos`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from keepstep.chaos.experiment import same_threads
from keepstep.cli.main import main
from keepstep.config.load import load_config
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
    "global_batch=8", "microbatch=2", "optimizer.lr=1e-2", "schedule.warmup=2ba", "evaluate.batches=1",
    "compute.threads=1", "compute.device=cpu", "observe.tensorboard=false",
]  # fmt: skip


def chaos(folder: Path, *words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "chaos", *TINY, f"runs_dir={folder}", *words, "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_chaos_recovered_runs_end_with_the_same_losses(tmp_path: Path) -> None:
    # A snapshot after every step, whatever it costs: on a busy machine the default would choose a longer interval.
    words = ["resilience.snapshot_interval=1", "--kinds", "kill-rank,nan,terminate,torn-write", "--steps", "16"]
    report = chaos(tmp_path, *words)
    faults = report["faults"]
    assert isinstance(faults, list)
    assert [fault["kind"] for fault in faults] == ["kill-rank", "nan", "terminate", "torn-write"]
    for fault in faults:
        assert fault["passed"], fault
        assert fault["loss_equal"], fault
        assert fault["steps_lost"] <= 1, fault


@pytest.mark.parametrize(
    "words",
    # Replicas that are groups of two processes: one of them is killed, and the group leaves and returns as a whole.
    [[], ["parallel.shard=2", "parallel.replicate=-1", "--procs", "4"]],
    ids=["processes", "groups"],
)
def test_chaos_survivors_of_two_replicas_and_of_a_spare_continue(tmp_path: Path, words: list[str]) -> None:
    report = chaos(tmp_path, *words, "--kinds", "kill-two-replicas,kill-spare", "--steps", "12")
    assert report["passed"], report
    for kind in ("kill-two-replicas", "kill-spare"):
        (path,) = tmp_path.glob(f"chaos-*/{kind}/events.jsonl")
        events = list(map(json.loads, path.read_text().splitlines()))
        replicas = {
            name: sorted(event["replica"] for event in events if event["kind"] == name)
            for name in ("left", "joined", "spare_lost", "spare_ready")
        }
        if kind == "kill-two-replicas":
            assert replicas == {"left": [1, 2], "joined": [1, 2], "spare_lost": [], "spare_ready": []}
        else:
            # The last of the three that is ready is the spare: which one that is depends on the machine.
            (spare,) = replicas["spare_lost"]
            assert replicas["left"] == []
            assert replicas["spare_ready"] == [spare, spare], "it is ready again after its end"
        assert not [event for event in events if event["kind"] == "restart"]


def test_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    report = chaos(tmp_path, "--random", "4", "--mtbf", "3", "--seed", "2")
    assert report["passed"]


@pytest.mark.cluster
def test_chaos_two_hosts_lose_network_and_host(tmp_path: Path) -> None:
    report = chaos(tmp_path, "--kinds", "lost-network,lost-host", "--steps", "28", "--timeout", "300")
    assert report["passed"]
    (events,) = tmp_path.glob("chaos-*/lost-host/events.jsonl")
    resumed = [line for line in map(json.loads, events.read_text().splitlines()) if line["kind"] == "resume"]
    assert resumed[0]["folder"] == "memory", "the new host's state comes from the memory of the other one"


@pytest.mark.cluster
def test_chaos_replicas_without_network_stop_and_join_again(tmp_path: Path) -> None:
    report = chaos(tmp_path, "--kinds", "split-network", "--timeout", "200")
    assert report["passed"], report
    (path,) = tmp_path.glob("chaos-*/split-network/events.jsonl")
    kinds = [line["kind"] for line in map(json.loads, path.read_text().splitlines())]
    assert [kind for kind in kinds if kind in ("left", "joined")] == ["left", "joined"]


def test_chaos_cancelled_leaves_no_run_behind(tmp_path: Path) -> None:
    words = [*TINY, f"runs_dir={tmp_path}", "--steps", "1000000", "--kinds", "nan"]
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep", "chaos", *words], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    wait_until(lambda: bool(list(tmp_path.glob("chaos-*/undisturbed/metrics.jsonl"))))
    assert training_in(tmp_path)
    process.terminate()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    wait_until(lambda: not training_in(tmp_path))


def wait_until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def training_in(folder: Path) -> list[int]:
    """Processes that were started with this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"keepstep\0train" in command and os.fsencode(folder) in command:
                found.append(int(entry.name))
    return found


def test_same_threads_for_every_run_of_an_experiment() -> None:
    # Left to themselves, two hosts of one process each would take twice the threads of one host with two.
    cores = len(os.sched_getaffinity(0))
    assert same_threads(load_config(None, ["data=synthetic"]).config, 2) == [f"compute.threads={max(1, cores // 2)}"]
    assert same_threads(load_config(None, ["data=synthetic", "compute.threads=3"]).config, 2) == []


def test_chaos_list_describes_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split(maxsplit=1) == ["kill-rank", "SIGKILL of one process"] for line in lines)
    assert any(line.split(maxsplit=1) == ["full-disk", "no space left for checkpoints"] for line in lines)
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
