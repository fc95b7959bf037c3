"""A checkpoint from the memory of an agent whose run cannot save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.in_memory import rescue as rescue_module
from keepstep.checkpoint.in_memory.rescue import rescue
from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots
from keepstep.checkpoint.protocol.commit import read_manifest
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.cli.main import main
from keepstep.config.schema import CheckpointConfig
from keepstep.core import proc
from keepstep.core.errors import CheckpointError, StorageFullError
from keepstep.core.ranks import MEMORY_NAME
from tests.checkpoint.support import example_state, same_tensors, zeroed
from tests.patience import PATIENCE_S
from tests.small_disk import small_disk

TINY = (
    "model.layers=1 model.hidden=64 model.heads=2 model.vocab=512 model.seq_len=32 data=synthetic global_batch=2 "
    "microbatch=1 compute.device=cpu compute.threads=1 observe.tensorboard=false schedule.warmup=2ba name=it "
    "checkpoint.interval=5ba evaluate.at_end=false"
)
PROCESS = os.getpid()


@pytest.fixture
def places() -> Iterator[list[Path]]:
    """Memory as an agent has it; this process is the agent."""
    handles = [os.memfd_create(MEMORY_NAME) for _ in range(2)]
    yield [Path(f"/proc/{PROCESS}/fd/{handle}") for handle in handles]
    for handle in handles:
        os.close(handle)


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "progress"}


def snapshot(places: list[Path], *steps: int) -> None:
    memory = InMemorySnapshots(places, metadata={"keepstep": "1"})
    try:
        for step in steps:
            state = example_state(step)
            memory.save(step, tensors_of(state), {"progress": state["progress"]}, {"loss": 1.0 / step})
            memory.join()
    finally:
        memory.close()


def test_rescue_writes_the_newest_snapshot_as_a_checkpoint(tmp_path: Path, places: list[Path]) -> None:
    snapshot(places, 5, 6, 7)
    store = LocalStore(tmp_path)
    step = rescue(PROCESS, store, after=41)
    assert (step.step, step.marker.sequence) == (7, 42)
    assert read_manifest(store, step).metadata == {"keepstep": "1", "loss": 1 / 7}
    into = zeroed(example_state(7))
    loaded = Checkpointer(tmp_path, CheckpointConfig()).load_newest(into)
    assert loaded is not None
    assert loaded.values["progress"] == example_state(7)["progress"]
    assert same_tensors(example_state(7), into)


def test_rescue_skips_a_snapshot_that_is_incomplete(
    tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(places, 5, 6)

    def die(*_: object) -> None:
        raise RuntimeError("killed in the middle of a copy")

    monkeypatch.setattr("keepstep.checkpoint.async_save.staging.StagingBuffer.start", die)
    with pytest.raises(RuntimeError):
        snapshot(places, 7)
    assert rescue(PROCESS, LocalStore(tmp_path)).step == 6


@pytest.mark.parametrize("memory", [0, 1 << 40], ids=["without a copy", "with a copy"])
def test_rescue_takes_the_newer_step_when_it_is_overtaken(
    tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    snapshot(places, 5, 6)
    real, steps = rescue_module.read_footer, iter([8, 9])

    def overtaken(fd: int) -> Any:
        step = next(steps, None)
        if step is not None and overtaken.calls >= 2:  # type: ignore[attr-defined]
            snapshot(places, step, step + 1)
        overtaken.calls += 1  # type: ignore[attr-defined]
        return real(fd)

    overtaken.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(rescue_module, "available_memory_bytes", lambda: memory)
    monkeypatch.setattr(rescue_module, "read_footer", overtaken)
    step = rescue(PROCESS, LocalStore(tmp_path))
    into = zeroed(example_state(step.step))
    Checkpointer(tmp_path, CheckpointConfig()).load(step, into)
    assert same_tensors(example_state(step.step), into)
    assert [path.name for path in tmp_path.glob("step_*")] == [step.name], "nothing half written is left"


def test_rescue_refuses_without_a_snapshot_or_room(
    tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="holds no snapshot"):
        rescue(PROCESS, LocalStore(tmp_path))
    snapshot(places, 5)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 100)
    with pytest.raises(StorageFullError, match=r"has 100 B free, and the step needs") as caught:
        rescue(PROCESS, LocalStore(tmp_path))
    assert caught.value.needed_bytes > 100
    assert not list(tmp_path.iterdir())


def test_ckpt_rescue_needs_a_live_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (tmp_path, tmp_path / "missing"):
        assert main(["ckpt", "rescue", str(run), "--to", str(tmp_path / "to")]) == 1
        assert f"no agent runs in {run} on this machine" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def keepstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "keepstep", *words]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_run_on_a_full_disk_is_rescued_and_continued(tmp_path: Path, processes: int) -> None:
    words = ["train", *TINY.split(), "--procs", str(processes)]
    undisturbed, continued, to = tmp_path / "undisturbed", tmp_path / "continued", tmp_path / "another disk"
    for duration in ("max_duration=30ba", "max_duration=40ba"):
        subprocess.run(keepstep(*words, duration, f"runs_dir={undisturbed}"), check=True, capture_output=True)
    # A save needs twice as much: all saves on the way are skipped, and the last one waits for room.
    with small_disk(tmp_path / "disk", 8) as disk:
        run = disk.folder / "it"
        command = keepstep(*words, "max_duration=30ba", f"runs_dir={disk.folder}")
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                answer = rescue_step(30, run, to, process)
                assert answer["agent"] == process.pid
            finally:
                # The agent and its workers, which would wait for room on their own.
                for member in [each.pid for each in proc.processes() if each.session == process.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
        assert not list((run / "checkpoints").glob("step_*"))
    words += ["max_duration=40ba", f"runs_dir={continued}", f"checkpoint.resume_from={answer['folder']}"]
    done = subprocess.run(keepstep(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 30 from step_00000030" in done.stderr
    same = keepstep("ckpt", "diff", str(undisturbed / "it"), str(continued / "it"))
    assert subprocess.run(same, check=False).returncode == 0, "the weights and moments of an undisturbed run"


def rescue_step(step: int, run: Path, to: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the run has come to its last step, then rescue until a snapshot of it is there."""
    deadline = time.monotonic() + PATIENCE_S
    metrics = run / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if not (metrics.exists() and f'"step":{step},' in metrics.read_text()):
            time.sleep(0.05)
            continue
        done = subprocess.run(
            keepstep("ckpt", "rescue", str(run), "--to", str(to), "--json"), capture_output=True, check=False
        )
        answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        if answer.get("step") == step:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"the run did not come to step {step}, or did not wait for room")
