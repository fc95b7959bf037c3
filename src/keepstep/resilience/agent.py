"""The agent: starts a node's processes, watches them, and restarts them from the last state after a fault.

It replaces torchrun's agent. Only the rendezvous of several nodes is torchrun's (see rendezvous.py).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from keepstep.config.schema import ResilienceConfig
from keepstep.core import proc
from keepstep.core.errors import (
    EXIT_FAILED,
    EXIT_HARDWARE,
    EXIT_STOPPED,
    KeepstepError,
    RunTakenError,
    StopRequested,
    UsageError,
)
from keepstep.core.ranks import (
    HEARTBEAT_FILE,
    LAUNCH,
    MEMORY_FILES,
    MEMORY_NAME,
    RENDEZVOUS_SECRET,
    STORE_FILE,
    NodeGroup,
    node_number,
)
from keepstep.resilience.failure_cause import CAUSE_FILE, Cause, first_cause, read_cause
from keepstep.resilience.heartbeat import HeartbeatTable
from keepstep.resilience.registration import AgentRegistration
from keepstep.resilience.rendezvous import REPORT_VALID_S, ElasticRendezvous, Rendezvous, RendezvousResult
from keepstep.resilience.restart_policy import FullDisk, RestartPolicy
from keepstep.resilience.scratch import fork_server_folder, register_companion, scratch_folder
from keepstep.resilience.signals import AgentSignals, WaitInterruptedError, shutdown_s
from keepstep.resilience.survivors.remote import RemoteSupervisor, SurvivorRendezvous, make_supervisor
from keepstep.resilience.survivors.supervisor import Supervisor, is_stopped
from keepstep.resilience.workers import STACKS_FILE, Task, Workers, hang_cause

POLL_S = 0.25
"""Between two checks of running processes; the end of a process is noticed immediately."""
STOPPED_POLL_S = 0.1
"""The same among replicas that outlive each other: all of them wait for one that a signal has stopped."""
WAITING_NODES_S = 1.0
SETTLE_S = 0.1
"""After the first process failed: how long to wait for another one that may know the cause better."""
MEMORY_BUFFERS = 4


@dataclass(frozen=True)
class AgentSettings:
    """What an agent knows about its run."""

    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    storage_wait_s: float = 600.0
    """How long to wait for room when a full disk ends the processes."""
    run_folder: Path | None = None
    """The folder by which other processes of this machine find the agent."""
    logs: Path | None = None
    """For the stacks of processes that hang."""
    on_event: Callable[..., None] = lambda *_, **__: None
    """Called as on_event(kind, **facts) for each fault, restart and resize."""
    is_over: Callable[[], bool] = lambda: False
    """Whether the run has finished since this agent started, perhaps on other nodes."""
    replica_size: int = 1
    """Processes of each replica, where replicas outlive each other."""


def run_processes(
    task: Task, processes: int, group: NodeGroup | None = None, settings: AgentSettings | None = None
) -> int:
    """Run `task` as `processes` processes of this node and return the run's exit code.

    Without a `group` this is the only node.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError("training processes need Linux", "see docs/platforms.md: a container or WSL is enough")
    # Operators set these per node, where torch expects them per process. The secret is for agents only.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", RENDEZVOUS_SECRET):
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, proc.available_cores() // processes)))
    proc.set_thread_defaults()
    if settings is None:
        settings = AgentSettings(ResilienceConfig(max_restarts=group.max_restarts if group else 0))
    several = group if group and group.max_nodes > 1 else None
    if settings.resilience.spares and processes == settings.replica_size and not several:
        raise UsageError("a spare copies the state of a replica that is left: one is not enough", "more --procs")
    if processes % settings.replica_size:
        wrong = f"{processes} processes of this node are no whole number of replicas with parallel.shard processes each"
        raise UsageError(wrong, f"parallel.shard={settings.replica_size} needs a multiple of {settings.replica_size}")
    with scratch_folder() as scratch:
        if several is None:
            rendezvous = Rendezvous(scratch)
        elif settings.resilience.survive:
            rendezvous = SurvivorRendezvous(several, node_number(os.environ), settings.is_over)
        else:
            rendezvous = ElasticRendezvous(several)
        return _Agent(task, processes, rendezvous, settings, scratch).run()


class _Agent:
    def __init__(
        self, task: Task, processes: int, rendezvous: Rendezvous, settings: AgentSettings, scratch: Path
    ) -> None:
        self._processes, self._settings, self._rendezvous = processes, settings, rendezvous
        self._scratch, self._logs = scratch, settings.logs or scratch
        register_companion(scratch, fork_server_folder())
        self._registration = AgentRegistration(settings.run_folder) if settings.run_folder else None
        self._workers = Workers(task)
        self._replica_size = settings.replica_size
        self._slots = processes + settings.resilience.spares * self._replica_size
        """Processes with those that wait to replace lost ones."""
        self._heartbeats = HeartbeatTable(self._slots)
        # The agent owns this memory, so snapshots in it survive the processes.
        self._memory = [[os.memfd_create(MEMORY_NAME) for _ in range(MEMORY_BUFFERS)] for _ in range(self._slots)]
        self._launch = secrets.token_hex(8)
        self._signals = AgentSignals()
        self._shutdown_s = shutdown_s()
        self._world_size = self._first_rank = self._attempts = 0
        self._policy = RestartPolicy(settings.resilience.max_restarts)
        self._full_disk = FullDisk(settings.storage_wait_s, settings.run_folder, scratch)
        replicas = processes // self._replica_size
        self._supervisor = make_supervisor(rendezvous, scratch, replicas, settings.resilience, settings.on_event)
        self._environments: list[dict[str, str]] = []
        self._replaced = Counter[int]()
        self._next_hang_check = 0.0

    def run(self) -> int:
        """Attempt after attempt until the run is over."""
        # If the rendezvous fails, the other nodes' runs are not over.
        code = EXIT_HARDWARE
        with self._signals.handled():
            try:
                code = self._run_attempts()
            except WaitInterruptedError:
                message = "stopped on request between two attempts: there was nothing new to save"
                _print(StopRequested(message, "start the same command to resume from the last checkpoint"))
                code = EXIT_STOPPED
            except RunTakenError:
                # This run is over on every node.
                code = EXIT_FAILED
                raise
            finally:
                self._workers.kill()
                if self._supervisor is not None:
                    self._supervisor.close()
                # A node that is unfit, or asked to leave, does not end the run of the others.
                self._rendezvous.close(done=code not in (EXIT_HARDWARE, EXIT_STOPPED))
                self._heartbeats.close()
                if self._registration is not None:
                    self._registration.close()
                for fd in chain(*self._memory):
                    os.close(fd)
        return code

    def _run_attempts(self) -> int:
        while True:
            with self._signals.interruptible():
                nodes = self._rendezvous.next()
            self._start(nodes)
            ended = self._watch()
            if isinstance(ended, int):
                return ended
            if self._signals.numbers:
                return self._stopped_code(ended or Cause("crash", "the attempt ended for an unknown reason"))
            # The snapshots in shared memory are the newest state: the processes have nothing left to save.
            self._workers.kill()
            code = self._prepare_restart(ended) if ended is not None else None
            if code is not None:
                return code

    def _start(self, nodes: RendezvousResult) -> None:
        world_size = nodes.nodes * self._processes
        if self._attempts and not isinstance(self._supervisor, RemoteSupervisor):
            facts: dict[str, Any] = {"world_size": world_size, "attempt": self._attempts}
            if self._world_size != world_size:
                self._settings.on_event("resize", before=self._world_size, **facts)
            else:
                self._settings.on_event("restart", **facts)
        self._world_size, self._first_rank = world_size, nodes.node_rank * self._slots
        self._heartbeats.clear(self._settings.resilience.start_timeout_s)
        if self._registration is not None:
            self._registration.refresh()
        # Cleaners of temporary files remove what nobody has touched for days.
        self._scratch.mkdir(parents=True, exist_ok=True)
        for local_rank in range(self._slots):
            self._cause_file(local_rank).unlink(missing_ok=True)
        also = self._supervisor.begin_attempt() if self._supervisor is not None else {}
        if also:
            self._rendezvous.publish({LAUNCH: self._launch, **also})
        slots = range(self._slots)
        self._environments = [{**self._environment(nodes, local_rank), **also} for local_rank in slots]
        self._replaced.clear()
        self._workers.start([{**self._environments[rank], **self._store_of(rank)} for rank in slots])
        self._attempts += 1

    def _environment(self, nodes: RendezvousResult, local_rank: int) -> dict[str, str]:
        # For its own snapshots and, with several nodes or once there were several, those of a process on another node.
        buffers = self._memory[local_rank]
        copies = (nodes.nodes > 1 and self._supervisor is None) or any(os.fstat(fd).st_size for fd in buffers[2:])
        memory = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (buffers if copies else buffers[:2])]
        return {
            "RANK": str(self._first_rank + local_rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self._processes),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempts),
            LAUNCH: self._launch,
            HEARTBEAT_FILE: str(self._heartbeats.path),
            MEMORY_FILES: os.pathsep.join(memory),
            CAUSE_FILE: str(self._cause_file(local_rank)),
            STACKS_FILE: str(self._stacks_file(local_rank)),
            **nodes.environment,
        }

    def _store_of(self, local_rank: int) -> dict[str, str]:
        """Through which the processes of one replica find each other; its successor has another one."""
        replica = local_rank // self._replica_size
        name = f"replica-store-{self._attempts}-{replica}-{self._replaced[replica]}"
        return {STORE_FILE: str(self._scratch / name)} if self._supervisor is not None else {}

    def _watch(self) -> int | Cause | None:
        """How the attempt ended: the exit code, a fault, or None because nodes join or leave."""
        checked_nodes_at, signals = time.monotonic(), self._signals
        forwarded, asked_at, making_room = 0, 0.0, False
        while True:
            self._workers.wait(POLL_S if self._supervisor is None else STOPPED_POLL_S, also=signals.wakeup_fd)
            with suppress(BlockingIOError):
                os.read(signals.wakeup_fd, 4096)
            if self._supervisor is not None:
                fault = self._keep_replicas(self._supervisor)
                if fault is not None or self._supervisor.cut_off:
                    return fault
            codes = self._exit_codes()
            if all(code in (0, EXIT_STOPPED) for code in codes):
                code = max(code or 0 for code in codes)
                saved_for_others = code == EXIT_STOPPED and not forwarded and (making_room or self._node_joins_soon())
                return None if saved_for_others else code
            if any(code not in (None, 0, EXIT_STOPPED) for code in codes):
                if self._supervisor is not None:
                    # It ended a moment ago: others may be able to continue.
                    continue
                return self._failure_cause()
            if len(signals.numbers) > forwarded:
                forwarded, asked_at = len(signals.numbers), time.monotonic()
                if signals.second_interrupt.received:
                    self._workers.stop_without_saving(partial(self._signalled_since, forwarded))
                    return 128 + signal.SIGINT
                if forwarded == 1 and not self._first_rank:
                    print(self._heartbeats.read(0).stop_notice(signals.numbers[0]), file=sys.stderr, flush=True)
                newest = signals.numbers[-1]
                self._workers.signal(signal.SIGTERM if newest == signal.SIGINT else newest)
            if forwarded and time.monotonic() - asked_at > self._shutdown_s:
                return Cause("hang", f"the processes did not stop within {self._shutdown_s:.0f} s")
            if not forwarded and (hang := self._hang()) is not None and not self._killed_alone(hang):
                return hang
            if not forwarded and time.monotonic() - checked_nodes_at > WAITING_NODES_S:
                checked_nodes_at = time.monotonic()
                if not making_room and self._rendezvous.nodes_waiting():
                    if self._newest_step() < 0:
                        # There is nothing to save yet, perhaps because the new node is the missing one.
                        return None
                    # Save and stop on every node, then hold a rendezvous with the new node.
                    making_room = True
                    self._workers.signal(signal.SIGTERM)

    def _exit_codes(self) -> list[int | None]:
        """Of the processes that count."""
        left_out = self._supervisor.left_out if self._supervisor is not None else ()
        codes = enumerate(self._workers.exit_codes)
        return [code for rank, code in codes if rank // self._replica_size not in left_out]

    def _keep_replicas(self, supervisor: Supervisor | RemoteSupervisor) -> Cause | None:
        """Replace replicas of which a process ended while others continue; the cause where nobody can."""
        supervisor.record_events()
        if supervisor.waited_in_vain:
            self._workers.signal(signal.SIGTERM)
        for local_rank, pid in enumerate(self._workers.pids):
            if is_stopped(pid):
                self._workers.kill_one(local_rank)
        for replica in range(self._slots // self._replica_size):
            ranks = range(replica * self._replica_size, (replica + 1) * self._replica_size)
            causes = self._causes(ranks)
            if not causes or replica in supervisor.left_out:
                continue
            step = max(self._heartbeats.read(local_rank).step for local_rank in ranks)
            verdict = supervisor.judge(first_cause(causes), replica, step)
            if verdict == "fault":
                return self._failure_cause()
            for local_rank in ranks:
                # Without one of them the others can do nothing.
                self._workers.kill_one(local_rank)
            if verdict == "leave out":
                supervisor.left_out.add(replica)
                continue
            self._replaced[replica] += 1
            for local_rank in ranks:
                self._cause_file(local_rank).unlink(missing_ok=True)
                self._heartbeats.clear_slot(local_rank, self._settings.resilience.start_timeout_s)
                environment = {**self._environments[local_rank], **self._store_of(local_rank)}
                self._workers.replace(local_rank, environment)
        return None

    def _killed_alone(self, hang: Cause) -> bool:
        """Kill only the process that hangs, where the others can continue without it."""
        if self._supervisor is None:
            return False
        if time.monotonic() > self._next_hang_check:
            # The others have been silent as well, and need the time of a step to prove that they are well.
            self._next_hang_check = time.monotonic() + self._settings.resilience.hang_s
            self._workers.kill_one(hang.rank - self._first_rank)
        return True

    def _signalled_since(self, count: int) -> bool:
        return len(self._signals.numbers) > count

    def _node_joins_soon(self) -> bool:
        """Whether the processes stopped because another node asked them to make room: it appears within seconds."""
        deadline = time.monotonic() + 3 * WAITING_NODES_S
        while isinstance(self._rendezvous, ElasticRendezvous) and time.monotonic() < deadline:
            if self._rendezvous.nodes_waiting():
                return True
            time.sleep(POLL_S)
        return False

    def _failure_cause(self) -> Cause:
        """Of the processes that failed together, the cause that explains the rest."""
        time.sleep(SETTLE_S)
        return first_cause(self._causes(range(self._slots)))

    def _causes(self, local_ranks: range) -> list[Cause]:
        """Of those among these processes that failed."""
        codes = self._workers.exit_codes
        return [
            read_cause(self._cause_file(local_rank), self._first_rank + local_rank, code)
            for local_rank in local_ranks
            if (code := codes[local_rank]) not in (None, 0, EXIT_STOPPED)
        ]

    def _hang(self) -> Cause | None:
        records = [self._heartbeats.read(local_rank) for local_rank in range(self._slots)]
        # A rank that waits for data reports it, so the silence of the others is not counted as a hang.
        if any(record.waits_for_data and not record.overdue for record in records):
            self._rendezvous.report_data_wait()
            return None
        # Start to listen to other nodes some seconds before their reports matter.
        in_time = all(record.age_s < record.limit_s - REPORT_VALID_S for record in records)
        if in_time or self._rendezvous.data_wait_reported():
            return None
        if not any(record.overdue for record in records):
            return None
        stacks = [self._stacks_file(local_rank) for local_rank in range(self._slots)]
        return hang_cause(self._workers, stacks, records, self._first_rank)

    def _newest_step(self) -> int:
        return max(self._heartbeats.read(local_rank).step for local_rank in range(self._slots))

    def _prepare_restart(self, cause: Cause) -> int | None:
        """Report a fault and do what must happen before a restart; the exit code if there is none."""
        if cause.kind == "taken":
            # The folder is another run's: write nothing into it. Not this node's exit code 5: no node is to blame.
            raise RunTakenError(cause.message, cause.hint)
        step = self._newest_step()
        if step >= 0:
            self._full_disk.clear()
        decision = self._policy.decide(cause, step)
        facts = {"what": cause.message, "cause": cause.kind, "rank": cause.rank, "host": cause.host}
        self._settings.on_event("fault", step=max(step, 0), **facts, final=not decision.restart)
        if not decision.restart:
            return self._give_up(cause)
        if decision.wait_for_room:
            can_rescue = any(os.fstat(fd).st_size for fd in chain(*self._memory))
            with self._signals.interruptible():
                has_room = self._full_disk.wait(cause, can_rescue)
            return None if has_room else self._give_up(cause)
        print(f"fault: {cause.message}; restarting from the last state", file=sys.stderr, flush=True)
        if decision.pause_s:
            with self._signals.interruptible():
                time.sleep(decision.pause_s)
        return None

    def _give_up(self, cause: Cause) -> int:
        _print(self._policy.report(cause, self._logs))
        return cause.exit_code

    def _stopped_code(self, cause: Cause) -> int:
        """The exit code after a stop request that not every process survived: the last checkpoint counts."""
        if not cause.restartable:
            return self._give_up(cause)
        sent = {number if number != signal.SIGINT else signal.SIGTERM for number in self._signals.numbers}
        hint = "start the same command to resume from the last checkpoint"
        if cause.exit_code - 128 in sent:
            # Our own signal ended a process that was still starting.
            _print(StopRequested("stopped on request: there was nothing new to save", hint))
        else:
            _print(KeepstepError(f"stopped on request, but without a save: {cause.message}", hint))
        return EXIT_STOPPED

    def _cause_file(self, local_rank: int) -> Path:
        return self._scratch / f"cause-{local_rank}.json"

    def _stacks_file(self, local_rank: int) -> Path:
        return self._logs / f"stacks-{self._first_rank + local_rank}.txt"


def _print(error: KeepstepError) -> None:
    print("\n".join(error.lines()), file=sys.stderr, flush=True)
