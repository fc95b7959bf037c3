"""The processes of a run on this node: forked from a warm one, watched, and ended together with all they started.

A warm process (Python's fork server) has imported everything a worker needs, so that a start, and above all a restart,
takes milliseconds where imports take seconds. It is single-threaded and has touched no GPU, which is what makes
forking it safe. Requests to stop are not meant for it: terminals and schedulers send theirs to every process of a job,
and the warm one must outlive its workers, or nobody would learn how they ended. It goes when the agent goes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from keepstep.resilience.signals import STOP_SIGNALS, heeded_signals, shutdown_s

STACKS_FILE = "KEEPSTEP_STACKS_FILE"
"""Environment variable: where a process writes its stacks when the agent asks for them."""
STACKS_SIGNAL = signal.SIGUSR2
_NOT_FOR_THE_WARM = (*STOP_SIGNALS, signal.SIGQUIT)


@dataclass(frozen=True)
class Task:
    """What every process of a run does."""

    target: Callable[[list[str]], int]
    """Importable by name; gets `arguments` and returns an exit code."""
    arguments: Sequence[str]
    preload: Sequence[str] = ()
    """Modules that the warm process imports ahead."""


class Workers:
    """This node's processes of one attempt after another."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Threads would not survive a fork: the numeric libraries must start none in the warm process.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(task.preload))
        self._heeded = (*heeded_signals(), signal.SIGQUIT)
        self._processes: list[BaseProcess] = []

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each environment; its place in the list is its local rank."""
        self._processes = [
            self._context.Process(target=_work, args=(self._task, dict(environment), self._heeded))
            for environment in environments
        ]
        _start_warm_process()
        for process in self._processes:
            process.start()

    def wait(self, seconds: float, also: int) -> None:
        """Return when a process ends, when the file descriptor `also` can be read, or when the time is over."""
        running = [process.sentinel for process in self._processes if process.is_alive()]
        connection.wait([*running, also], seconds)

    @property
    def exit_codes(self) -> list[int | None]:
        """By local rank; None while it runs, negative for a signal."""
        return [process.exitcode for process in self._processes]

    @property
    def pids(self) -> list[int]:
        """By local rank; each is also the number of its process group."""
        return [process.pid or 0 for process in self._processes]

    def signal(self, number: int) -> None:
        """Send a signal to the processes that still run."""
        for process in self._processes:
            if process.is_alive() and process.pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """End all processes and what they started, now: after a fault there is nothing left for them to do."""
        groups = [process.pid for process in self._processes if process.pid]
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for process in self._processes:
            if process.pid:
                # A process that has not yet made its group is missed above.
                process.kill()
                process.join()
                process.close()
        self._processes = []
        _wait_until_gone(groups)


def _start_warm_process() -> None:
    """Start the process that workers are forked from, unless it runs, with the stop signals blocked from its birth.

    Blocked, not ignored: what is sent to a worker that has only just been forked waits until the worker can take it.
    """
    # Python starts its tracker along with the fork server, and unblocks signals when it has.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_WARM)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_until_gone(groups: Sequence[int], seconds: float = 1.0) -> None:
    """A helper of a dead process must not touch files that the next attempt writes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _has_members(set(groups)):
        time.sleep(0.005)


def _has_members(groups: set[int]) -> bool:
    """Whether a process of one of the groups still runs; the dead whom nobody has waited for do not count."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) in groups and state not in "ZX":
                    return True
    return False


def _work(task: Task, environment: dict[str, str], heeded: Sequence[int]) -> None:
    """In the new process."""
    # A group of its own: helpers it starts can be ended with it, and a terminal's Ctrl-C reaches the agent alone.
    os.setpgid(0, 0)
    for number in heeded:
        # All but what the agent was started to ignore.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_THE_WARM)
    os.environ.update(environment)
    threading.Thread(target=_stop_with_agent, name="agent-watch", daemon=True).start()
    stacks = environment.get(STACKS_FILE)
    if stacks:
        # The handler is C code: it also works while the interpreter waits inside a collective.
        faulthandler.register(STACKS_SIGNAL, file=Path(stacks).open("a"), all_threads=True)  # noqa: SIM115
    raise SystemExit(task.target(list(task.arguments)))


def _stop_with_agent() -> None:
    """When the agent is gone, save and stop as on any request: nobody is left who could restart us."""
    agent = multiprocessing.parent_process()
    assert agent is not None
    connection.wait([agent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(shutdown_s())
    # It hangs, and the agent that would have noticed is gone: its GPU and its helpers must not be held for ever.
    os.killpg(os.getpgrp(), signal.SIGKILL)
