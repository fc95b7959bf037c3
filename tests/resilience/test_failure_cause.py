"""Every failure has a kind, and only some kinds are worth another attempt."""

from __future__ import annotations

import errno
import inspect
from pathlib import Path

import pytest

from keepstep.core import errors
from keepstep.core.errors import (
    EXIT_FAILED,
    EXIT_STORAGE_FULL,
    CheckpointError,
    ConfigError,
    DataAccessError,
    DataError,
    DivergedError,
    HardwareError,
    KeepstepError,
    MissingCheckpointError,
    NothingToReadError,
    NotSavedError,
    PreflightError,
    RunTakenError,
    StateMismatchError,
    StopRequested,
    StorageError,
    StorageFullError,
    UsageError,
)
from keepstep.resilience.failure_cause import CAUSE_FILE, Cause, classify, first_cause, read_cause, write_cause

OURS: list[tuple[KeepstepError, str, bool]] = [
    (KeepstepError("gave up"), "refused", False),
    (UsageError("no such option"), "config", False),
    (RunTakenError("another process trains here"), "taken", False),
    (ConfigError("wrong"), "config", False),
    (PreflightError("a check failed"), "refused", False),
    (DataError("cut off"), "data", True),
    (NothingToReadError("no such file"), "refused", False),
    (DataAccessError("no such bucket"), "access", True),
    (HardwareError("no GPU"), "hardware", False),
    (DivergedError("the loss is nan"), "refused", False),
    (CheckpointError("no step is intact"), "refused", False),
    (StorageError("not reachable"), "storage", True),
    (StorageFullError("no room", "free some", 1000, 10), "full", True),
    (NotSavedError("the last step is not on disk", None, EXIT_STORAGE_FULL), "refused", False),
    (MissingCheckpointError("resume_from is no step"), "config", False),
    (StateMismatchError("another model's"), "config", False),
    (StopRequested("stopped"), "refused", False),
]
FOREIGN: list[tuple[BaseException, str, bool]] = [
    (RuntimeError("a bug"), "crash", True),
    (MemoryError(), "oom", True),
    (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "oom", True),
    (RuntimeError("CUDA error: out of memory"), "oom", True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "oom", True),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "crash", True),
    (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "peer", True),
    (type("DistBackendError", (RuntimeError,), {})("NCCL timeout"), "peer", True),
    (RuntimeError("NCCL error: unhandled system error"), "peer", True),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "peer", True),
    (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "peer", True),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), "peer", True),
    (OSError(errno.EHOSTUNREACH, "No route to host"), "peer", True),
    (TimeoutError("timed out"), "storage", True),
    (OSError(errno.ENOSPC, "No space left on device"), "full", True),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "full", True),
    (OSError(errno.EIO, "Input/output error"), "storage", True),
    (OSError(errno.ESTALE, "Stale file handle"), "storage", True),
    (OSError(errno.EACCES, "Permission denied"), "access", True),
    (OSError(errno.EROFS, "Read-only file system"), "access", True),
    (OSError(errno.ENOENT, "No such file or directory"), "access", True),
    (OSError(errno.EEXIST, "File exists"), "crash", True),
]


@pytest.mark.parametrize(("error", "kind", "restarts"), [*OURS, *FOREIGN], ids=lambda value: repr(value)[:50])
def test_classify_kind_of_every_failure(
    error: Exception, kind: str, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert classify(error) == kind
    monkeypatch.setenv(CAUSE_FILE, str(tmp_path / "cause"))
    write_cause(error, rank=3)
    cause = read_cause(tmp_path / "cause", 3, 1)
    assert (cause.kind, cause.rank, cause.restartable) == (kind, 3, restarts)
    code = error.exit_code if isinstance(error, KeepstepError) else EXIT_FAILED
    assert cause.exit_code == (EXIT_STORAGE_FULL if kind == "full" else code)
    assert bool(cause.traceback) != isinstance(error, KeepstepError), "only bugs need a traceback"


def test_classify_covers_every_error_class() -> None:
    classes = {each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, KeepstepError)}
    assert classes == {type(error) for error, _, _ in OURS}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "s3://bucket/missing"), "access"),
        (PermissionError(errno.EACCES, "Access Denied"), "access"),
        (OSError(errno.ENOSPC, "No space left on device"), "full"),
        (OSError(errno.EIO, "Input/output error"), "data"),
        (ConnectionError("Could not connect to the endpoint URL"), "data"),
    ],
)
def test_classify_looks_at_the_reason_of_a_data_error(reason: OSError, kind: str) -> None:
    error = DataError("cannot be read")
    error.__cause__ = reason
    assert classify(error) == kind


def test_classify_looks_at_the_reason_of_a_checkpoint_error() -> None:
    error = CheckpointError("weights cannot be read")
    assert classify(error) == "refused"
    error.__cause__ = OSError(errno.EIO, "Input/output error")
    assert classify(error) == "storage"


def test_write_cause_keeps_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_FILE, str(tmp_path / "cause"))
    write_cause(OSError(errno.ENOSPC, "No space left on device", "/full/file"), 0)
    write_cause(RuntimeError("what followed from it"), 0)
    cause = read_cause(tmp_path / "cause", 0, 1)
    assert (cause.kind, cause.path) == ("full", "/full/file")


def test_read_cause_without_a_file_uses_the_exit_code(tmp_path: Path) -> None:
    killed = read_cause(tmp_path / "none", 1, -9)
    assert killed.kind == "crash"
    assert "SIGKILL" in killed.message
    assert read_cause(tmp_path / "none", 1, 2).kind == "config"
    lost_peer = Cause("peer", "connection reset", 0)
    assert first_cause([lost_peer, killed]) is killed, "a process that only lost a peer is not the reason"
