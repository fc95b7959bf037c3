"""Who does which task on one machine: worker processes, each handed one task at a time.

A worker that dies is replaced and its tasks done again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.core.errors import DataError, KeepstepError
from keepstep.data.build.plan import TOKENIZER, Plan
from keepstep.data.build.progress import Progress
from keepstep.data.fast import FastLoad

if TYPE_CHECKING:
    from keepstep.data.build.task import TaskRun
    from keepstep.data.tokenize import Encoder

_DEATHS_ALLOWED = 3
_REPORT_EVERY_S = 0.2


def load_encoder(path: Path, loading: FastLoad | None = None) -> Encoder:
    """The build's tokenizer, both ways of it; what `loading` began is gone on with."""
    # The fast encoder loads beside the import of numpy and the load of the exact one.
    loading = loading or FastLoad(path)
    import keepstep.data.build.task  # noqa: F401 - before the fork
    from keepstep.data.tokenize import Encoder

    return Encoder(path, fast=loading)


@dataclass
class _Worker:
    process: BaseProcess
    tasks: list[int] = field(default_factory=list)
    """Handed out and not done: the one at work, and perhaps the one before it, on its way to the disk."""
    dismissed: bool = False


class Crew:
    """Worker processes that are handed one task at a time."""

    def __init__(self, folder: Path, plan: Plan, tasks: Sequence[int], encoder: Encoder, progress: Progress) -> None:
        self._folder = folder
        self._plan = plan
        self._waiting = list(reversed(tasks))
        self._encoder = encoder
        self._progress = progress
        self._deaths = 0
        self._threads = 1
        # A forked worker has its imports and its tokenizer already.
        forks = sys.platform == "linux"
        self._context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
        self._workers: dict[Connection, _Worker] = {}

    def run(self, count: int) -> None:
        """Until every task is done or one fails for good."""
        self._encoder.settle()
        self._threads = max(1, len(os.sched_getaffinity(0)) // count)
        try:
            for _ in range(count):
                self._hire()
            while self._workers:
                for ready in wait(list(self._workers), timeout=1.0):
                    assert isinstance(ready, Connection)
                    self._listen(ready, self._workers[ready])
        finally:
            for worker in self._workers.values():
                # Nothing it holds is lost with it, and a request to end would be lost on one that is only just forked.
                worker.process.kill()
                worker.process.join()

    def _hire(self) -> None:
        ours, theirs = self._context.Pipe()
        forks = self._context.get_start_method() == "fork"
        # A forked worker has our ends of all pipes open, too: were they to stay so, no worker would hear that we died.
        ours_too = [*self._workers, ours] if forks else []
        arguments = (theirs, ours_too, self._folder, self._plan, self._encoder if forks else None, self._threads)
        process = self._context.Process(target=_work_on_tasks, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._workers[ours] = _Worker(process)
        self._hand_out(ours, self._workers[ours])

    def _hand_out(self, connection: Connection, worker: _Worker) -> None:
        task = self._waiting.pop() if self._waiting else -1
        if task < 0:
            worker.dismissed = True
        else:
            worker.tasks.append(task)
        # One that died since it asked: listening to it says so.
        with contextlib.suppress(ConnectionError):
            connection.send(task)

    def _listen(self, connection: Connection, worker: _Worker) -> None:
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            self._part(connection, worker)
            return
        match message:
            case ("progress", size_bytes, tokens):
                self._progress.add(size_bytes, tokens)
            case ("next",):
                self._hand_out(connection, worker)
            case ("done", task, notice):
                worker.tasks.remove(task)
                self._progress.done(task)
                self._progress.notice(notice)
            case ("failed", error):
                raise error

    def _part(self, connection: Connection, worker: _Worker) -> None:
        """A worker has ended: after its last task, or in the middle of one, which another then does again."""
        del self._workers[connection]
        connection.close()
        worker.process.join()
        if worker.dismissed and not worker.tasks:
            return
        self._deaths += 1
        code = worker.process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        where = f"task {' and '.join(map(str, worker.tasks))}"
        if self._deaths > _DEATHS_ALLOWED:
            raise DataError(
                f"{self._deaths} workers died, the last on {where} ({how})",
                "memory may be short: use fewer --workers, then start the same command again"
                if code < 0
                else "what each of them said last is printed above",
            )
        self._progress.notice(f"a worker died on {where} ({how}): doing it again")
        self._waiting += reversed(worker.tasks)
        self._hire()


def _work_on_tasks(
    connection: Connection,
    not_ours: Sequence[Connection],
    folder: Path,
    plan: Plan,
    encoder: Encoder | None,
    threads: int,
) -> None:
    """The life of a worker. A parent that dies closes the pipe, which ends us when we next say or ask something."""
    for other in not_ours:
        other.close()
    # Read when the exact tokenizer's thread pool starts, that is with the first batch.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    from keepstep.data.build.task import TaskRun

    encoder = encoder or load_encoder(folder / TOKENIZER)
    report = _Reporter(connection)
    publishing: _Publishing | None = None
    try:
        while (task := connection.recv()) >= 0:
            run = TaskRun(folder, task)
            run.write(plan.tasks[task], plan.options, encoder, report.add)
            report.send()
            if publishing is not None:
                connection.send(("done", publishing.wait(), encoder.notice))
            publishing = _Publishing(run)
            connection.send(("next",))
        if publishing is not None:
            connection.send(("done", publishing.wait(), encoder.notice))
    except KeepstepError as error:
        with contextlib.suppress(ConnectionError):
            connection.send(("failed", type(error)(error.message, error.hint)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


class _Publishing(threading.Thread):
    """Publishes a task while its worker writes the next: the one waits for the disk, the other for the processor."""

    def __init__(self, run: TaskRun) -> None:
        super().__init__(name=f"publish-{run.task}")
        self._run = run
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """The thread's work."""
        try:
            self._run.publish()
        except BaseException as error:  # the worker raises it where it waits
            self._error = error

    def wait(self) -> int:
        """The task, once it is marked done."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._run.task


class _Reporter:
    """Tells the parent how far a worker is, a few times a second: each message wakes a process that has no core."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._read_bytes = 0
        self._tokens = 0
        self._last_s = time.monotonic()

    def add(self, read_bytes: int, tokens: int) -> None:
        """Count, and send when it is time."""
        self._read_bytes += read_bytes
        self._tokens += tokens
        if time.monotonic() - self._last_s >= _REPORT_EVERY_S:
            self.send()

    def send(self) -> None:
        """Send what was counted since the last time."""
        self._connection.send(("progress", self._read_bytes, self._tokens))
        self._read_bytes = self._tokens = 0
        self._last_s = time.monotonic()
