"""The agent: starts a node's processes, watches them, and when something breaks starts them again where they were."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import EXIT_FAILED, EXIT_HARDWARE, EXIT_STOPPED, KeepstepError, StopRequested
from keepstep.core.nodes import NodeGroup
from keepstep.core.ranks import LAUNCH, MEMORY_FILES, PULSE_FILE
from keepstep.resilience.causes import CAUSE_FILE, Cause, first_cause, read_cause
from keepstep.resilience.hangs import look_at, most_suspect
from keepstep.resilience.meeting import HEARD_S, Alone, Elastic, Meeting, Meetings
from keepstep.resilience.pulse import Board
from keepstep.resilience.scratch import remove_with, scratch_folder, server_folder
from keepstep.resilience.signals import Patience, heeded_signals, shutdown_s
from keepstep.resilience.workers import STACKS_FILE, Task, Workers

POLL_S = 0.25
"""Between looks at processes that run; one that ends is seen at once."""
WAITING_NODES_S = 1.0
SETTLE_S = 0.1
"""After the first process failed: how long to wait for another that may know better why."""
LONGEST_BACKOFF_S = 60.0
MEMORY_BUFFERS = 4
OOM_ATTEMPTS = 1

Tell = Callable[..., None]
"""Called as tell(kind, **facts) for each event: fault, restart, resize."""


def run_processes(
    task: Task,
    processes: int,
    group: NodeGroup | None = None,
    settings: ResilienceConfig | None = None,
    tell: Tell | None = None,
    logs: Path | None = None,
) -> int:
    """Run `task` as `processes` processes of this node and return the run's exit code.

    Without a `group` this node is the only one. Stacks of processes that hang are written into `logs`.
    """
    # Operators set these for a node where torch means a process.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with scratch_folder() as where:
        meetings = Alone(where) if group is None or group.max_nodes == 1 else Elastic(group)
        chosen = settings or ResilienceConfig(max_restarts=group.max_restarts if group else 0)
        agent = _Agent(task, processes, meetings, chosen, tell or (lambda *_, **__: None), where, logs or where)
        return agent.run()


@dataclass
class _Ending:
    """How an attempt ended: with a code, by a fault, or because nodes come and go."""

    code: int | None = None
    cause: Cause | None = None


class _Agent:
    def __init__(
        self,
        task: Task,
        processes: int,
        meetings: Meetings,
        settings: ResilienceConfig,
        tell: Tell,
        scratch: Path,
        logs: Path,
    ) -> None:
        self._processes, self._settings, self._tell = processes, settings, tell
        self._meetings, self._scratch, self._logs = meetings, scratch, logs
        remove_with(scratch, server_folder())
        self._workers = Workers(task)
        self._board = Board(processes)
        # Owned by the agent: what a process has put there is there when the process is gone.
        self._memory = [[os.memfd_create("keepstep-state") for _ in range(MEMORY_BUFFERS)] for _ in range(processes)]
        self._launch = secrets.token_hex(8)
        self._signals: list[int] = []
        self._patience = Patience()
        self._shutdown_s = shutdown_s()
        self._waiting = False
        self._waker = -1
        self._world_size = 0
        self._first_rank = 0
        self._attempts = 0
        self._fruitless = 0
        self._furthest = -1

    def run(self) -> int:
        """Attempt after attempt until the run is over."""
        # Until told otherwise the nodes could not meet, which is nobody's last word.
        code = EXIT_HARDWARE
        with self._listening():
            try:
                code = self._attempt_until_over()
            except _WaitEndedError:
                message = "stopped on request between two attempts: nothing new was there to save"
                self._say(StopRequested(message, "start the same command to go on from the last checkpoint"))
                code = EXIT_STOPPED
            finally:
                self._workers.kill()
                # A node that is unfit, or asked to leave, is no reason to end the run of the others.
                self._meetings.close(done=code not in (EXIT_HARDWARE, EXIT_STOPPED))
                self._board.close()
                for handle in chain(*self._memory):
                    os.close(handle)
        return code

    def _attempt_until_over(self) -> int:
        while True:
            with self._ended_by_a_signal():
                meeting = self._meetings.next()
            self._start(meeting)
            ending = self._watch()
            code = self._exit_code(ending)
            # What the processes had put down in shared memory is the newest state there is: nothing is left to save.
            self._workers.kill()
            if code is not None:
                return code
            if ending.cause is not None and ending.cause.kind in ("storage", "data"):
                # Time may mend these.
                with self._ended_by_a_signal():
                    time.sleep(min(LONGEST_BACKOFF_S, 0.5 * 2**self._fruitless))

    def _exit_code(self, ending: _Ending) -> int | None:
        """The run's exit code if it is over; None if it goes on."""
        if ending.code is not None:
            return ending.code
        if self._signals:
            return self._stopped_code(ending.cause or _UNKNOWN)
        if ending.cause is not None and not self._goes_on(ending.cause):
            return ending.cause.exit_code
        return None

    def _start(self, meeting: Meeting) -> None:
        world_size = meeting.nodes * self._processes
        if self._attempts:
            facts: dict[str, Any] = {"world_size": world_size, "attempt": self._attempts}
            if self._world_size != world_size:
                self._tell("resize", before=self._world_size, **facts)
            else:
                self._tell("restart", **facts)
        self._world_size, self._first_rank = world_size, meeting.node_rank * self._processes
        self._board.clear(self._settings.start_timeout_s)
        # Whatever cleans up temporary files takes those that nobody has touched for days.
        self._scratch.mkdir(parents=True, exist_ok=True)
        for place in range(self._processes):
            self._cause_file(place).unlink(missing_ok=True)
        self._workers.start([self._environment(meeting, place) for place in range(self._processes)])
        self._attempts += 1

    def _environment(self, meeting: Meeting, place: int) -> dict[str, str]:
        # Its own newest steps, and those of a process on another node where there is one.
        buffers = self._memory[place] if meeting.nodes > 1 else self._memory[place][: MEMORY_BUFFERS // 2]
        memory = [f"/proc/{os.getpid()}/fd/{handle}" for handle in buffers]
        return {
            **meeting.environment,
            "RANK": str(self._first_rank + place),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self._processes),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempts),
            LAUNCH: self._launch,
            PULSE_FILE: str(self._board.path),
            MEMORY_FILES: os.pathsep.join(memory),
            CAUSE_FILE: str(self._cause_file(place)),
            STACKS_FILE: str(self._stacks_file(place)),
        }

    def _watch(self) -> _Ending:
        looked_at = time.monotonic()
        forwarded, asked_at, making_room = 0, 0.0, False
        while True:
            self._workers.wait(POLL_S, also=self._waker)
            with suppress(BlockingIOError):
                os.read(self._waker, 4096)
            codes = self._workers.exit_codes
            if all(code is not None and code in (0, EXIT_STOPPED) for code in codes):
                code = max(code or 0 for code in codes)
                saved_for_others = code == EXIT_STOPPED and not forwarded and (making_room or self._somebody_waits())
                return _Ending(code=None if saved_for_others else code)
            if any(code is not None and code not in (0, EXIT_STOPPED) for code in codes):
                return _Ending(cause=self._why())
            if len(self._signals) > forwarded:
                forwarded, asked_at = len(self._signals), time.monotonic()
                if self._patience.lost:
                    return _Ending(code=128 + signal.SIGINT)
                self._workers.signal(signal.SIGTERM if self._signals[-1] == signal.SIGINT else self._signals[-1])
            if forwarded and time.monotonic() - asked_at > self._shutdown_s:
                return _Ending(cause=Cause("hang", f"the processes did not stop within {self._shutdown_s:.0f} s"))
            if not forwarded and (hang := self._hang()) is not None:
                return _Ending(cause=hang)
            if not forwarded and time.monotonic() - looked_at > WAITING_NODES_S:
                looked_at = time.monotonic()
                if not making_room and self._meetings.others_wait():
                    if self._furthest_step() < 0:
                        # Nothing is done yet that could be saved; perhaps because it is the newcomer who is missing.
                        return _Ending()
                    # Save and stop, here and with that on every node, then meet again with the newcomer.
                    making_room = True
                    self._workers.signal(signal.SIGTERM)

    def _somebody_waits(self) -> bool:
        """Whether the processes stopped because another node asked them to make room: it shows within moments."""
        deadline = time.monotonic() + 3 * WAITING_NODES_S
        while isinstance(self._meetings, Elastic) and time.monotonic() < deadline:
            if self._meetings.others_wait():
                return True
            time.sleep(POLL_S)
        return False

    def _why(self) -> Cause:
        """The cause of a failure: of those that failed together, the one that explains the rest."""
        time.sleep(SETTLE_S)
        causes = [
            read_cause(self._cause_file(place), self._first_rank + place, code)
            for place, code in enumerate(self._workers.exit_codes)
            if code is not None and code not in (0, EXIT_STOPPED)
        ]
        return first_cause(causes)

    def _hang(self) -> Cause | None:
        beats = [self._board.read(place) for place in range(self._processes)]
        # One that waits for its data says so all the time, and the silence of the others is theirs for it.
        if any(beat.waits and not beat.overdue for beat in beats):
            self._meetings.say_data_wait()
            return None
        # Other nodes are listened to a while before their word counts.
        if all(beat.age_s < beat.limit_s - HEARD_S for beat in beats) or self._meetings.hears_data_wait():
            return None
        overdue = [beat for beat in beats if beat.overdue]
        if not overdue:
            return None
        looks = look_at(self._workers, [self._stacks_file(place) for place in range(self._processes)])
        suspect = most_suspect(looks, beats)
        silent_s = max(beat.age_s for beat in overdue)
        rank = self._first_rank + suspect.local_rank
        others = {look.collective for look in looks if look.collective and look is not suspect}
        waiting = f"; others wait in {', '.join(sorted(others))}" if others else ""
        message = f"no step for {silent_s:.1f} s: rank {rank} is {suspect.describe()}{waiting}"
        return Cause("hang", message, rank, socket.gethostname(), EXIT_FAILED)

    def _goes_on(self, cause: Cause) -> bool:
        """Tell of a fault and judge whether another attempt makes sense."""
        if cause.kind == "taken":
            return False
        furthest = self._furthest_step()
        self._fruitless = 0 if furthest > self._furthest else self._fruitless + 1
        self._furthest = max(self._furthest, furthest)
        limit = min(self._settings.max_restarts, OOM_ATTEMPTS) if cause.kind == "oom" else self._settings.max_restarts
        final = not cause.restartable or not limit or self._fruitless > limit
        facts = {"what": cause.message, "cause": cause.kind, "rank": cause.rank, "host": cause.host, "final": final}
        self._tell("fault", step=max(furthest, 0), **facts)
        if final:
            if cause.restartable and limit:
                hint = "its traceback is above" if cause.kind != "oom" else "lower microbatch or set compute.recompute"
                self._say(KeepstepError(f"given up after {self._fruitless} attempts without progress", hint))
            return False
        print(f"fault: {cause.message}; going on from the last state", file=sys.stderr, flush=True)
        return True

    def _furthest_step(self) -> int:
        return max(self._board.read(place).step for place in range(self._processes))

    def _stopped_code(self, cause: Cause) -> int:
        """After a stop request that not every process lived to follow: the last checkpoint stands, go on from there."""
        if not cause.restartable:
            return cause.exit_code
        sent = {number if number != signal.SIGINT else signal.SIGTERM for number in self._signals}
        hint = "start the same command to go on from the last checkpoint"
        if cause.exit_code - 128 in sent:
            # Our own signal ended a process that was still starting.
            self._say(StopRequested("stopped on request: nothing new was there to save", hint))
        else:
            self._say(KeepstepError(f"stopped on request, but without a save: {cause.message}", hint))
        return EXIT_STOPPED

    def _cause_file(self, place: int) -> Path:
        return self._scratch / f"cause-{place}.json"

    def _stacks_file(self, place: int) -> Path:
        return self._logs / f"stacks-{self._first_rank + place}.txt"

    def _say(self, error: KeepstepError) -> None:
        print("\n".join(error.lines()), file=sys.stderr, flush=True)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        numbers = (*heeded_signals(), signal.SIGQUIT)
        before = {number: signal.signal(number, self._heard) for number in numbers}
        # A signal ends the wait for processes at once.
        self._waker, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        woken_before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._waker)
            os.close(written)

    def _heard(self, number: int, _frame: object) -> None:
        self._signals.append(number)
        self._patience.hear(number)
        if self._waiting:
            self._waiting = False
            raise _WaitEndedError

    @contextmanager
    def _ended_by_a_signal(self) -> Iterator[None]:
        """A wait between two attempts: no process runs that could follow a request to stop, so it ends here at once."""
        self._waiting = True
        try:
            if self._signals:
                raise _WaitEndedError
            yield
        finally:
            self._waiting = False


class _WaitEndedError(BaseException):
    """A signal during a wait. Not an Exception: what catches those inside the wait must let this pass."""


_UNKNOWN = Cause("crash", "the attempt ended without a word")
