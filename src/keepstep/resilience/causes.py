"""Why a process ended, and what to do about it: a crash wants a restart, a mistake wants a person."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.errors import (
    EXIT_CONFIG,
    CheckpointError,
    ConfigError,
    DataError,
    HardwareError,
    KeepstepError,
    NothingToReadError,
    RunTakenError,
    StateMismatchError,
    UsageError,
)

CAUSE_FILE = "KEEPSTEP_CAUSE_FILE"
"""Environment variable: where a process writes down why it fails, for its node's agent."""

Kind = Literal["crash", "oom", "hang", "peer", "storage", "data", "hardware", "config", "refused", "taken"]
"""peer: another process vanished, so this one could not go on. refused: the run itself gave up, a restart is no use.
hardware: this machine is not fit for the run; whoever placed it here must choose another. taken: the folder is another
run's, whose files nothing must be told to."""

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "broken pipe", "socket")


@dataclass(frozen=True)
class Cause:
    """Why one process ended."""

    kind: Kind
    message: str
    rank: int = -1
    host: str = ""
    exit_code: int = 1

    @property
    def restartable(self) -> bool:
        """Whether another attempt may go better."""
        return self.kind not in ("config", "refused", "hardware", "taken")


def classify(error: BaseException) -> Kind:
    """What kind of trouble an exception is."""
    match error:
        case RunTakenError():
            return "taken"
        case ConfigError() | UsageError() | StateMismatchError():
            return "config"
        case NothingToReadError():
            return "refused"
        case DataError():
            return "data"
        case CheckpointError():
            return "storage"
        case HardwareError():
            return "hardware"
        case KeepstepError():
            return "refused"
        case MemoryError():
            return "oom"
        case OSError() if error.errno in _STORAGE_ERRORS:
            return "storage"
    if type(error).__name__ == "OutOfMemoryError":
        return "oom"
    text = f"{type(error).__name__} {error}".lower()
    if type(error).__name__.startswith("Dist") or any(word in text for word in _PEER_WORDS):
        return "peer"
    return "crash"


def write_cause(error: BaseException, rank: int) -> None:
    """Tell the agent, as a failing process's last act; without an agent nobody is told."""
    path = os.environ.get(CAUSE_FILE)
    if path is None:
        return
    message = str(error).strip() or type(error).__name__
    code = error.exit_code if isinstance(error, KeepstepError) else 1
    cause = Cause(classify(error), f"{type(error).__name__}: {message}"[:2000], rank, socket.gethostname(), code)
    lines = traceback.format_exception(error)
    # Where even this cannot be written, the exit code still tells something; another error would tell less.
    with suppress(OSError):
        Path(path).write_text(json.dumps({"cause": asdict(cause), "traceback": "".join(lines)[-8000:]}))


def read_cause(path: Path, rank: int, exit_code: int) -> Cause:
    """What a process that ended said of itself, or what its exit code says of it."""
    host = socket.gethostname()
    try:
        return Cause(**json.loads(path.read_text())["cause"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else str(-exit_code)
        return Cause("crash", f"process of rank {rank} was ended by {name}", rank, host, 128 - exit_code)
    if exit_code == EXIT_CONFIG:
        return Cause("config", f"process of rank {rank} refused its configuration", rank, host, exit_code)
    return Cause("crash", f"process of rank {rank} ended with exit code {exit_code}", rank, host, exit_code)


def first_cause(causes: list[Cause]) -> Cause:
    """The one that explains the others: who only lost a peer is not to blame."""
    return next((cause for cause in causes if cause.kind != "peer"), causes[0])
