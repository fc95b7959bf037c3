"""The half of `--on ssh` that runs on each host, as `keepstep launch host` with an order in JSON on its standard input.

The agent is started apart from the connection: a lost connection ends only what follows its log. While the agent or one
of its processes lives it holds a lock, which the kernel releases however they end.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from keepstep import __version__
from keepstep.core.errors import EXIT_HARDWARE, UsageError
from keepstep.core.files import write_atomic
from keepstep.launch.local import visible_gpus

MARK = b"keepstep-host "
"""Comes before an answer and before a log: a login shell may print something of its own first."""
POLL_S = 0.2


class _Node:
    """The files of one node's agent. Hosts that share storage see those of all nodes."""

    def __init__(self, folder: str, number: int) -> None:
        self.folder = Path(folder)
        self.log, self.lock, self.exit_code = (self.folder / f"node-{number}.{end}" for end in ("log", "lock", "exit"))

    def is_running(self) -> bool:
        """Whether the agent, whose process number is in the lock's file, holds the lock."""
        if not self.lock.exists():
            return False
        with self.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def serve(order: Mapping[str, Any]) -> int:
    """Do what the submitting machine asks."""
    node = _Node(order["job_folder"], order["node"])
    match order["action"]:
        case "check":
            with socket.create_server(("", 0)) as listener:
                port = listener.getsockname()[1]
            offset = node.log.stat().st_size if node.log.exists() else 0
            return _answer(version=__version__, gpus=visible_gpus(), port=port, offset=offset)
        case "start":
            return _start(node, order)
        case "signal":
            if running := node.is_running():
                os.kill(int(node.lock.read_text()), order["signal"])
            return _answer(running=running)
        case "follow":
            return _follow(node, order["offset"], order["to_the_end"])
    code = int(node.exit_code.read_text()) if node.exit_code.exists() else EXIT_HARDWARE
    return _answer(running=node.is_running(), code=code if node.lock.exists() else None)


def _answer(**facts: object) -> int:
    print(MARK.decode() + json.dumps(facts))
    return 0


def _start(node: _Node, order: Mapping[str, Any]) -> int:
    node.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(node.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            "the run is still running here", "stop it with keepstep stop NAME, or choose another name with name=NAME"
        ) from None
    node.exit_code.unlink(missing_ok=True)
    if order["config"]:
        write_atomic(node.folder / "run.yaml", order["config"])
    secrets = {name: Path(path).read_text().strip() for name, path in order["secrets"].items()}
    launch = ["launch", "node", "--nodes", order["nodes"], "--processes", str(order["processes"])]
    command = [sys.executable, "-m", "keepstep", *launch, "--max-restarts", str(order["max_restarts"]), "--"]
    started, tell = os.pipe()
    if os.fork() == 0:
        _supervise(node, [*command, *order["words"]], {**os.environ, **order["variables"], **secrets}, (lock, tell))
    os.close(tell)
    # Until the agent's process number is written, nobody could stop it.
    return _answer(started=bool(os.read(started, 1)))


def _supervise(node: _Node, command: list[str], environment: dict[str, str], files: tuple[int, int]) -> NoReturn:
    """In a process of its own: start the agent, wait for it, write its exit code."""
    lock, tell = files
    try:
        os.setsid()
        log = os.open(node.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        process = subprocess.Popen(command, env=environment, pass_fds=[lock])
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(process.pid).encode(), 0)
        os.write(tell, b"x")
        os.close(tell)
        code = process.wait()
        write_atomic(node.exit_code, str(code if code >= 0 else 128 - code))
    finally:
        # Never back into the caller's code: this is a fork of it.
        os._exit(0)


def _follow(node: _Node, offset: int, to_the_end: bool) -> int:
    """Write the log from a byte on, until the agent has ended; returns the agent's exit code."""
    # Not through sys.stdout, which hides that the connection is gone: this process must end then.
    os.write(1, MARK + b"\n")
    while True:
        # Asked before the log is read, so that nothing printed in between is missed.
        over = not to_the_end or not node.is_running()
        if node.log.exists():
            with node.log.open("rb") as file:
                file.seek(offset)
                while chunk := file.read(1 << 16):
                    offset += len(chunk)
                    while chunk:
                        chunk = chunk[os.write(1, chunk) :]
        if over:
            break
        time.sleep(POLL_S)
    if to_the_end and not node.exit_code.exists():
        print("error: the agent was killed, or the machine restarted\n hint: its kernel log tells why", file=sys.stderr)
        return EXIT_HARDWARE
    return int(node.exit_code.read_text()) if to_the_end else 0
