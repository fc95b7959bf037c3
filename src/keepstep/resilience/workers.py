"""The processes of a run on this node: forked from a fork server, watched, and killed together with their children.

Before processes that hang are killed, they are inspected: which one hangs, and where.
Python's fork server has imported everything a worker needs, so that a start, and above all a restart, takes
milliseconds where imports take seconds. It is single-threaded and has touched no GPU, which makes forking safe.
Terminals and schedulers send stop signals to every process of a job. The fork server must not react to them: it has to
outlive the workers, or the agent would not learn how they ended. It ends with the agent.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from keepstep.config.schema import ResilienceConfig
from keepstep.core import proc
from keepstep.core.ranks import HEARTBEAT_FILE
from keepstep.resilience.failure_cause import Cause
from keepstep.resilience.heartbeat import Heartbeat, HeartbeatRecord
from keepstep.resilience.signals import STOP_SIGNALS, active_stop_signals, shutdown_s

STACKS_FILE = "KEEPSTEP_STACKS_FILE"
"""Environment variable: the file for a process's stacks when the agent requests them."""
STACKS_SIGNAL = signal.SIGUSR2
STACKS_WAIT_S = 0.5
WRITER_GRACE_S = 0.5
WRITER_TIMEOUT_S = 120.0
"""How long a save under way may take after a second Ctrl-C."""
BEFORE_WORK_S = 10.0
"""How long a process that has nothing to save yet may live longer than its agent: it holds the run's folder."""
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a device or a file system"}
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+ in (?P<name>\S+)')
_COLLECTIVE_FILES = ("distributed_c10d.py", "survivors/replica.py")
_BLOCKED_IN_FORK_SERVER = (*STOP_SIGNALS, signal.SIGQUIT)


@dataclass(frozen=True)
class Task:
    """What every process of a run executes."""

    target: Callable[[list[str]], int]
    """Importable by name; receives `arguments` and returns an exit code."""
    arguments: Sequence[str]
    preload: Sequence[str] = ()
    """Modules that the fork server imports in advance."""


class Workers:
    """This node's processes of one attempt after another."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Threads do not survive a fork: the numeric libraries must not start any in the fork server.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["keepstep.resilience.fork_server", *task.preload])
        self._stop_signals = (*active_stop_signals(), signal.SIGQUIT)
        self._processes: list[BaseProcess] = []

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one process per environment; the position in the list is the local rank."""
        self._processes = [self._new(environment) for environment in environments]
        _start_fork_server()
        for process in self._processes:
            process.start()

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> None:
        """Kill what is left of one process and start another in its place."""
        self.kill_one(local_rank)
        before = self._processes[local_rank]
        before.join()
        _wait_until_gone([before.pid or 0])
        before.close()
        self._processes[local_rank] = self._new(environment)
        self._processes[local_rank].start()

    def kill_one(self, local_rank: int) -> None:
        """Kill one process and everything that it started."""
        process = self._processes[local_rank]
        if process.pid:  # else it would be our own group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()

    def _new(self, environment: Mapping[str, str]) -> BaseProcess:
        return self._context.Process(target=_work, args=(self._task, dict(environment), self._stop_signals))

    def wait(self, seconds: float, also: int) -> None:
        """Wait until a process ends, the file descriptor `also` is readable, or the time is over."""
        running = [process.sentinel for process in self._processes if process.is_alive()]
        connection.wait([*running, also], seconds)

    @property
    def exit_codes(self) -> list[int | None]:
        """By local rank: None while the process runs, negative for a signal."""
        return [process.exitcode for process in self._processes]

    @property
    def pids(self) -> list[int]:
        """By local rank; each is also the id of a process group."""
        return [process.pid or 0 for process in self._processes]

    def signal(self, number: int) -> None:
        """Send a signal to all running processes."""
        for process in self._processes:
            if process.is_alive() and process.pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill all processes and everything they started; after a fault they have nothing left to do."""
        groups = [process.pid for process in self._processes if process.pid]
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for process in self._processes:
            if process.pid:
                # A process that has not created its group yet is missed above.
                process.kill()
                process.join()
                process.close()
        self._processes = []
        _wait_until_gone(groups)

    def stop_without_saving(self, hurry: Callable[[], bool]) -> None:
        """End the processes now, but let a save that is being written finish, unless there is a third Ctrl-C."""
        for process in self._processes:
            process.kill()
            process.join()
        for group in self.pids:
            # Writers ignore this signal and end when their save is done.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGTERM)
        if not _wait_until_gone(self.pids, WRITER_GRACE_S):
            print("finishing the save under way; press Ctrl-C again to end it", file=sys.stderr, flush=True)
            _wait_until_gone(self.pids, WRITER_TIMEOUT_S, hurry)


def _start_fork_server() -> None:
    """Start the fork server with stop signals blocked, unless it runs already.

    Blocked, not ignored: a signal to a worker that was just forked stays pending until the worker can handle it.
    """
    # Python starts its resource tracker together with the fork server, and unblocks signals afterwards.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_FORK_SERVER)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_until_gone(groups: Sequence[int], seconds: float = 1.0, hurry: Callable[[], bool] = lambda: False) -> bool:
    """Wait for the helpers of dead processes, which must not touch files that the next attempt writes.

    False when the time is over or there is a hurry.
    """
    deadline = time.monotonic() + seconds
    while any(process.group in groups and process.running for process in proc.processes()):
        if time.monotonic() > deadline or hurry():
            return False
        time.sleep(0.005)
    return True


def _work(task: Task, environment: dict[str, str], stop_signals: Sequence[int]) -> None:
    """In the new process."""
    # A process group of its own: its helpers can be killed with it, and a terminal's Ctrl-C reaches only the agent.
    os.setpgid(0, 0)
    # Importing it ends garbage collection, which is for the fork server alone.
    from keepstep.resilience.fork_server import collect_in_fork

    collect_in_fork()
    for number in stop_signals:
        # All except those that the agent was started to ignore.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_IN_FORK_SERVER)
    os.environ.update(environment)
    proc.set_process_name(f"keepstep r{environment.get('RANK', '')}")
    heartbeat = _own_heartbeat(environment)
    threading.Thread(target=_stop_with_agent, args=(heartbeat,), name="agent-watch", daemon=True).start()
    stacks = environment.get(STACKS_FILE)
    if stacks:
        # The handler is C code, so it works while the interpreter waits inside a collective.
        faulthandler.register(STACKS_SIGNAL, file=Path(stacks).open("a"), all_threads=True)  # noqa: SIM115
    raise SystemExit(task.target(list(task.arguments)))


def _own_heartbeat(environment: Mapping[str, str]) -> Heartbeat | None:
    """What this process reports; None if the agent, in whose memory it is, is gone already."""
    try:
        return Heartbeat(Path(environment[HEARTBEAT_FILE]), int(environment["LOCAL_RANK"]), ResilienceConfig())
    except FileNotFoundError:
        return None


def _stop_with_agent(heartbeat: Heartbeat | None) -> None:
    """When the agent dies, save and stop as on any request: nobody is left to restart this process."""
    agent = multiprocessing.parent_process()
    assert agent is not None
    connection.wait([agent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    # Before its first heartbeat it has nothing to save, and may wait for processes that never join.
    has_begun = heartbeat is not None and heartbeat.newest.count > 0
    time.sleep(shutdown_s() if has_begun else min(BEFORE_WORK_S, shutdown_s()))
    # It hangs, and no agent is left to notice: release its GPU and its helpers.
    os.killpg(os.getpgrp(), signal.SIGKILL)


@dataclass(frozen=True)
class WorkerState:
    """What is known about one process that may hang."""

    local_rank: int
    state: str
    """The kernel's one-letter state: R, S, D, T."""
    collective: str
    """The collective that it waits in, or an empty string."""
    stack: str

    def describe(self) -> str:
        """In a few words."""
        if self.state in _STATES:
            return _STATES[self.state]
        if self.collective:
            return f"waiting in {self.collective}"
        # Python lists the main thread, which trains, last; the others always wait for something.
        innermost = _FRAME.search(self.stack.rpartition("hread 0x")[2])
        return f"in {innermost['name']} ({Path(innermost['file']).name})" if innermost else "silent"


def hang_cause(
    workers: Workers, stack_files: Sequence[Path], records: Sequence[HeartbeatRecord], first_rank: int
) -> Cause:
    """Which of the processes hangs, in one sentence."""
    states = _inspect(workers, stack_files)
    suspect = most_suspect(states, records)
    silent_s = max(record.age_s for record in records if record.overdue)
    rank = first_rank + suspect.local_rank
    others = {state.collective for state in states if state.collective and state is not suspect}
    waiting = f"; others wait in {', '.join(sorted(others))}" if others else ""
    message = f"no step for {silent_s:.1f} s: rank {rank} is {suspect.describe()}{waiting}"
    return Cause("hang", message, rank, socket.gethostname())


def _inspect(workers: Workers, stack_files: Sequence[Path]) -> list[WorkerState]:
    """Make every process write its stacks, and read its state from the kernel."""
    sizes = [file.stat().st_size if file.exists() else 0 for file in stack_files]
    workers.signal(STACKS_SIGNAL)
    time.sleep(STACKS_WAIT_S)
    states = []
    for local_rank, (pid, file, size) in enumerate(zip(workers.pids, stack_files, sizes, strict=True)):
        stack = file.read_text(errors="replace")[size:] if file.exists() else ""
        status = proc.status(pid)
        states.append(WorkerState(local_rank, status.state if status else "?", _collective(stack), stack))
    return states


def most_suspect(states: Sequence[WorkerState], records: Sequence[HeartbeatRecord]) -> WorkerState:
    """A process that the kernel holds, else one that waits in no collective, else the one that got least far."""
    held = [state for state in states if state.state in _STATES]
    outside = [state for state in states if state.stack and not state.collective]
    return (held or outside or sorted(states, key=lambda state: records[state.local_rank].count))[0]


def _collective(stack: str) -> str:
    """The innermost torch collective that any thread is in."""
    collectives = (each for each in _FRAME.finditer(stack) if each["file"].endswith(_COLLECTIVE_FILES))
    return next((each["name"] for each in collectives if each["name"] != "wrapper"), "")
