"""Why a process failed, and whether a restart can help: a crash needs a restart, a mistake needs a person."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from keepstep.core import errors

CAUSE_FILE = "KEEPSTEP_CAUSE_FILE"
"""Environment variable: the file in which a failing process describes the cause for its node's agent."""

Kind = Literal[
    "crash", "oom", "hang", "peer", "storage", "full", "data", "access", "hardware", "config", "refused", "taken"
]
"""peer: another process was lost. full: the disk is full. access: a file or a permission is missing. refused: the run
itself gave up. hardware: this machine is not fit for the run. taken: another run trains in the folder."""

PERMANENT: frozenset[Kind] = frozenset({"config", "refused", "hardware", "taken"})
"""A restart fails in the same way. So does one after `access`, unless the run has made progress before."""
NEEDS_TIME: frozenset[Kind] = frozenset({"storage", "data", "access"})
"""A restart may succeed after a pause."""

_ERRNO_NAMES: dict[Kind, str] = {
    "full": "ENOSPC EDQUOT",
    "access": "ENOENT EACCES EPERM EROFS ENOTDIR EISDIR ELOOP ENAMETOOLONG",
    "storage": "EIO ESTALE ETIMEDOUT EBUSY EREMOTEIO ENODEV ENXIO",
    "peer": "ENETUNREACH EHOSTUNREACH ENETDOWN EHOSTDOWN ENOTCONN",
    "oom": "ENOMEM",
}
_ERRNO_KINDS = {getattr(errno, name): kind for kind, names in _ERRNO_NAMES.items() for name in names.split()}
_ERROR_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Kind, tuple[Kind, ...]], ...] = (
    (errors.RunTakenError, "taken", ()),
    ((errors.ConfigError, errors.UsageError, errors.StateMismatchError, errors.MissingCheckpointError), "config", ()),
    (errors.NothingToReadError, "refused", ()),
    (errors.DataAccessError, "access", ()),
    (errors.StorageFullError, "full", ()),
    (errors.DataError, "data", ("full", "access")),
    (errors.StorageError, "storage", ()),
    (errors.CheckpointError, "refused", ("full", "access", "storage", "peer")),
    (errors.HardwareError, "hardware", ()),
    (errors.KeepstepError, "refused", ()),
    (MemoryError, "oom", ()),
    (ConnectionError, "peer", ()),
    (TimeoutError, "storage", ()),
)
"""Subclasses first. With each: what the operating system's error behind ours may say instead."""
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "broken pipe", "socket")
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "_status_alloc_failed")


@dataclass(frozen=True)
class Cause:
    """Why one process ended."""

    kind: Kind
    message: str
    rank: int = -1
    host: str = ""
    exit_code: int = errors.EXIT_FAILED
    hint: str | None = None
    path: str = ""
    """The file or folder that has no room."""
    needed_bytes: int = 0
    """How much room is needed there, as far as that is known."""
    traceback: str = ""
    """Only for errors that are not a KeepstepError."""

    @property
    def restartable(self) -> bool:
        """Whether another attempt may succeed."""
        return self.kind not in PERMANENT


def classify(error: BaseException) -> Kind:
    """The kind of an exception."""
    for types, kind, root_kinds in _ERROR_KINDS:
        if isinstance(error, types):
            return _root_kind(error, root_kinds) or kind
    if isinstance(error, OSError):
        return _ERRNO_KINDS.get(error.errno, "crash")
    text = f"{type(error).__name__} {error}".lower()
    if type(error).__name__ == "OutOfMemoryError" or any(word in text for word in _OOM_WORDS):
        return "oom"
    if type(error).__name__.startswith("Dist") or any(word in text for word in _PEER_WORDS):
        return "peer"
    return "crash"


def _root_kind(error: BaseException, kinds: tuple[Kind, ...]) -> Kind | None:
    """The kind of the operating system's error behind one of ours, if it is one of `kinds`."""
    found = (_ERRNO_KINDS.get(reason.errno, "crash") for reason in _chain(error) if isinstance(reason, OSError))
    return next((kind for kind in found if kind in kinds), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def cause_of(error: BaseException, rank: int) -> Cause:
    """Everything an agent needs to know about an exception."""
    kind = classify(error)
    if isinstance(error, errors.KeepstepError):
        message, hint, code = error.message, error.hint, error.exit_code
    else:
        message, hint, code = f"{type(error).__name__}: {str(error).strip()}".rstrip(": "), None, errors.EXIT_FAILED
    return Cause(
        kind=kind,
        message=message[:2000],
        rank=rank,
        host=socket.gethostname(),
        exit_code=errors.EXIT_STORAGE_FULL if kind == "full" else code,
        hint=hint,
        path=next((str(each.filename) for each in _chain(error) if isinstance(each, OSError) and each.filename), ""),
        needed_bytes=error.needed_bytes if isinstance(error, errors.StorageFullError) else 0,
        traceback="" if isinstance(error, errors.KeepstepError) else "".join(traceback.format_exception(error))[-8000:],
    )


def write_cause(error: BaseException, rank: int) -> None:
    """Tell the agent, as the last act of a failing process. Without an agent this does nothing."""
    path = os.environ.get(CAUSE_FILE)
    if path is None or Path(path).exists():
        return
    # If this cannot be written, the exit code still says something; another error would say less.
    with suppress(OSError):
        Path(path).write_text(json.dumps(asdict(cause_of(error, rank))))


def read_cause(path: Path, rank: int, exit_code: int) -> Cause:
    """What a failed process wrote, or what its exit code says."""
    host = socket.gethostname()
    try:
        return Cause(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else str(-exit_code)
        return Cause("crash", f"rank {rank} was killed by {name}", rank, host, 128 - exit_code)
    if exit_code == errors.EXIT_CONFIG:
        return Cause("config", f"rank {rank} refused its configuration", rank, host, exit_code)
    return Cause("crash", f"rank {rank} ended with exit code {exit_code}", rank, host, exit_code)


def first_cause(causes: list[Cause]) -> Cause:
    """The cause that explains the others: a process that only lost a peer is not the reason."""
    return next((cause for cause in causes if cause.kind != "peer"), causes[0])
