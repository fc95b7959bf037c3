"""Signs of life, causes and suspects: what an agent judges its processes by."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    HardwareError,
    StateMismatchError,
)
from keepstep.resilience.causes import CAUSE_FILE, Cause, classify, first_cause, read_cause, write_cause
from keepstep.resilience.hangs import Look, most_suspect
from keepstep.resilience.pulse import Beat, Board, Pulse
from keepstep.resilience.scratch import remove_with, scratch_folder


def test_a_process_is_overdue_after_the_time_it_named_itself() -> None:
    board = Board(2)
    board.clear(1000.0)
    pulse = Pulse(board.path, 1, ResilienceConfig(hang_s=0.05, start_timeout_s=1000.0))
    for step in range(1, 4):
        pulse.stepped(step)
    assert board.read(1).step == 3
    assert not board.read(1).overdue
    time.sleep(0.1)
    assert board.read(1).overdue
    assert not board.read(0).overdue, "it is still starting, which takes long"
    pulse.busy()
    assert not board.read(1).overdue, "saving and evaluating have a limit of their own"
    board.close()


def test_one_that_waits_for_its_data_says_so_and_is_overdue_when_it_stops_saying_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("keepstep.resilience.pulse.time.monotonic", lambda: now[0])
    board = Board(1)
    pulse = Pulse(board.path, 0, ResilienceConfig(hang_s=10.0, start_timeout_s=1800.0))
    for step in range(4):
        pulse.stepped(step)
    for _ in range(300):
        now[0] += 1.0
        pulse.waiting()
        assert board.read(0).waits
        assert not board.read(0).overdue
    now[0] += 11.0
    assert board.read(0).overdue
    pulse.stepped(4)
    assert not board.read(0).waits
    assert pulse.limit_s == 10.0, "time spent on waiting says nothing about steps"
    board.close()


def test_slow_steps_are_no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("keepstep.resilience.pulse.time.monotonic", lambda: now[0])
    pulse = Pulse(None, 0, ResilienceConfig(hang_s=10.0, start_timeout_s=1800.0))
    assert pulse.limit_s == 1800.0
    for step in range(20):
        pulse.stepped(step)
        now[0] += 60.0
    assert pulse.limit_s == pytest.approx(180.0), "three times what a step takes"


@pytest.mark.parametrize(
    ("error", "kind", "restarts"),
    [
        (RuntimeError("a bug"), "crash", True),
        (MemoryError(), "oom", True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "oom", True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "peer", True),
        (type("DistBackendError", (RuntimeError,), {})("NCCL timeout"), "peer", True),
        (OSError(errno.ENOSPC, "No space left on device"), "storage", True),
        (CheckpointError("torn"), "storage", True),
        (StateMismatchError("another model's"), "config", False),
        (DataError("gone"), "data", True),
        (ConfigError("wrong"), "config", False),
        (DivergedError("the loss is nan"), "refused", False),
        (HardwareError("no GPU"), "hardware", False),
    ],
)
def test_every_failure_has_a_kind_and_only_some_are_worth_another_attempt(
    error: Exception, kind: str, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert classify(error) == kind
    monkeypatch.setenv(CAUSE_FILE, str(tmp_path / "cause"))
    write_cause(error, rank=3)
    cause = read_cause(tmp_path / "cause", 3, 1)
    assert (cause.kind, cause.rank, cause.restartable) == (kind, 3, restarts)


def test_a_process_that_says_nothing_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    killed = read_cause(tmp_path / "none", 1, -9)
    assert killed.kind == "crash"
    assert "SIGKILL" in killed.message
    assert read_cause(tmp_path / "none", 1, 2).kind == "config"
    lost_peer = Cause("peer", "connection reset", 0)
    assert first_cause([lost_peer, killed]) is killed, "who only lost another process is not to blame"


def test_the_suspect_is_held_still_or_the_one_that_waits_for_nobody() -> None:
    frame = '  File "/x/distributed_c10d.py", line 1 in all_reduce'
    beats = [Beat(20, 10, 5, 50), Beat(20, 10, 5, 49), Beat(20, 10, 5, 51)]
    waiting = [Look(rank, "S", "all_reduce", frame) for rank in range(3)]
    assert most_suspect(waiting, beats).local_rank == 1, "the one that got least far"
    asleep = Look(2, "S", "", '  File "/x/loader.py", line 9 in read')
    assert most_suspect([*waiting[:2], asleep], beats).describe() == "in read (loader.py)"
    stopped = Look(0, "T", "", "")
    assert most_suspect([stopped, waiting[1], asleep], beats).describe() == "stopped by a signal"


def test_what_a_killed_agent_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "keepstep-agent-dead"
    left.mkdir()
    (left / "lock").touch()
    with scratch_folder() as first:
        assert not left.exists()
        with scratch_folder() as second:
            assert first.is_dir(), "its agent lives"
            assert second != first
    assert not list(tmp_path.iterdir())


def test_the_fork_servers_folder_of_a_killed_agent_goes_too_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    kept, gone = tmp_path / "precious", tmp_path / "tmp" / "pymp-1"
    for number, folder in enumerate((kept, gone)):
        folder.mkdir(parents=True)
        left = tmp_path / "tmp" / f"keepstep-agent-{number}"
        left.mkdir(parents=True)
        (left / "lock").touch()
        remove_with(left, folder)
    with scratch_folder():
        assert kept.exists()
        assert not gone.exists()
