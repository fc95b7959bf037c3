"""The worker processes of a build on one machine, each assigned one task at a time, and their progress.

A worker that dies is replaced, and its tasks are done again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.errors import DataError, KeepstepError
from keepstep.core.proc import available_cores
from keepstep.core.terminal import StatusLine
from keepstep.core.units import format_seconds
from keepstep.data.fast_tokenizer import FastLoad
from keepstep.data.formats.build_folder import TOKENIZER
from keepstep.data.prepare.plan import Plan

if TYPE_CHECKING:
    from concurrent.futures import Future

    from keepstep.data.prepare.task import TaskRun
    from keepstep.data.tokenization import Encoder

_CRASHES_ALLOWED = 3
_REPORT_EVERY_S = 0.2


def load_encoder(path: Path, loading: FastLoad | None = None) -> Encoder:
    """The build's tokenizer with its exact and its fast encoder; `loading` is a fast one that is being loaded."""
    # The fast encoder loads while numpy is imported and the exact one is loaded.
    loading = loading or FastLoad(path)
    import keepstep.data.prepare.task  # noqa: F401 - before the fork
    from keepstep.data.tokenization import Encoder

    return Encoder(path, fast=loading)


class Progress:
    """Done tasks, speed and remaining time on stderr: a line every few seconds, or one line on a terminal."""

    def __init__(self, task_bytes: Sequence[int], tasks: Sequence[int], *, at_most: bool = False) -> None:
        """`at_most`: the build may end before it has read everything."""
        self._eta = "eta at most" if at_most else "eta"
        self._task_bytes = task_bytes
        self._total = sum(task_bytes[task] for task in tasks)
        self._tasks = len(tasks)
        self._tasks_done = 0
        self._bytes_done = 0
        self._read_bytes = 0
        self._tokens = 0
        self._start_s = time.monotonic()
        self._last_s = self._start_s
        self._line = StatusLine()
        self._notices: set[str] = set()

    def add(self, read_bytes: int, tokens: int) -> None:
        """Count what a worker has read and written."""
        self._read_bytes += read_bytes
        self._tokens += tokens
        now_s = time.monotonic()
        if now_s - self._last_s >= (0.5 if self._line.live else 10.0):
            self._last_s = now_s
            self._draw(now_s)

    def done(self, task: int) -> None:
        """Count a finished task."""
        self._tasks_done += 1
        self._bytes_done += self._task_bytes[task]

    def notice(self, text: str) -> None:
        """Print a notice once."""
        if text and text not in self._notices:
            self._notices.add(text)
            self._line.note(f"notice: {text}")

    def end(self) -> None:
        """Print the last line."""
        if self._tasks:
            self._draw(time.monotonic())
            self._line.close()

    def _draw(self, now_s: float) -> None:
        elapsed_s = max(1e-3, now_s - self._start_s)
        # A restarted task is read twice, and a compressed task may end before all its bytes were counted.
        read = min(self._total, max(self._read_bytes, self._bytes_done))
        left_s = (self._total - read) * elapsed_s / max(1, read)
        self._line.draw(
            f"{self._tasks_done}/{self._tasks} tasks  {read / elapsed_s / 1e6:.1f} MB/s  "
            f"{self._tokens / elapsed_s / 1e6:.2f} M tokens/s  {self._eta} {format_seconds(left_s)}"
        )


@dataclass
class _Worker:
    process: BaseProcess
    tasks: list[int] = field(default_factory=list)
    """Assigned and not done: the current one, and perhaps the previous one while it is being published."""
    finishing: bool = False
    """No tasks are left: the worker was asked to exit."""


class WorkerPool:
    """Worker processes that are assigned one task at a time."""

    def __init__(self, folder: Path, plan: Plan, tasks: Sequence[int], encoder: Encoder, progress: Progress) -> None:
        self._folder = folder
        self._plan = plan
        self._pending = list(reversed(tasks))
        self._encoder = encoder
        self._progress = progress
        self._crashes = 0
        self._threads = 1
        # A forked worker inherits the imports and the tokenizer.
        self._context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._workers: dict[Connection, _Worker] = {}

    def run(self, count: int) -> None:
        """Run until every task is done or one fails for good."""
        self._encoder.finish_loading()
        self._threads = max(1, available_cores() // count)
        try:
            for _ in range(count):
                self._start_worker()
            while self._workers:
                for ready in wait(list(self._workers), timeout=1.0):
                    assert isinstance(ready, Connection)
                    self._receive(ready, self._workers[ready])
        finally:
            for worker in self._workers.values():
                # Kill is safe, since unfinished tasks are done again. A worker that was just forked ignores SIGTERM.
                worker.process.kill()
                worker.process.join()

    def _start_worker(self) -> None:
        parent_end, worker_end = self._context.Pipe()
        forks = self._context.get_start_method() == "fork"
        # A forked worker inherits the parent's end of every pipe and must close them, or no worker would notice that
        # the parent died.
        inherited = [*self._workers, parent_end] if forks else []
        arguments = (worker_end, inherited, self._folder, self._plan, self._encoder if forks else None, self._threads)
        process = self._context.Process(target=_worker_main, args=arguments, daemon=True)
        process.start()
        worker_end.close()
        self._workers[parent_end] = _Worker(process)
        self._assign_task(parent_end, self._workers[parent_end])

    def _assign_task(self, connection: Connection, worker: _Worker) -> None:
        task = self._pending.pop() if self._pending else -1
        if task < 0:
            worker.finishing = True
        else:
            worker.tasks.append(task)
        # If the worker died meanwhile, the next receive reports it.
        with contextlib.suppress(ConnectionError):
            connection.send(task)

    def _receive(self, connection: Connection, worker: _Worker) -> None:
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            self._reap(connection, worker)
            return
        match message:
            case ("progress", size_bytes, tokens):
                self._progress.add(size_bytes, tokens)
            case ("next",):
                self._assign_task(connection, worker)
            case ("done", task, notice):
                worker.tasks.remove(task)
                self._progress.done(task)
                self._progress.notice(notice)
            case ("failed", error):
                raise error

    def _reap(self, connection: Connection, worker: _Worker) -> None:
        """Handle a worker's end: after its last task, or in the middle of one, which another worker then does again."""
        del self._workers[connection]
        connection.close()
        worker.process.join()
        if worker.finishing and not worker.tasks:
            return
        self._crashes += 1
        code = worker.process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        where = f"task {' and '.join(map(str, worker.tasks))}"
        if self._crashes > _CRASHES_ALLOWED:
            raise DataError(
                f"{self._crashes} workers died, the last on {where} ({how})",
                "memory may be short: use fewer --workers, then start the same command again"
                if code < 0
                else "the last output of each is printed above",
            )
        self._progress.notice(f"a worker died on {where} ({how}): doing it again")
        self._pending += reversed(worker.tasks)
        self._start_worker()


def _worker_main(
    connection: Connection,
    inherited: Sequence[Connection],
    folder: Path,
    plan: Plan,
    encoder: Encoder | None,
    threads: int,
) -> None:
    """The worker process. If the parent dies, the pipe closes and the next send or receive ends the worker."""
    for other in inherited:
        other.close()
    # The exact tokenizer reads this when its thread pool starts, with the first batch.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    from concurrent.futures import ThreadPoolExecutor

    from keepstep.data.prepare.task import TaskRun

    encoder = encoder or load_encoder(folder / TOKENIZER)
    report = _Reporter(connection)
    # Publishing waits for the disk: the worker computes its next task meanwhile.
    publisher = ThreadPoolExecutor(1)
    publishing: Future[int] | None = None
    try:
        while (task := connection.recv()) >= 0:
            run = TaskRun(folder, plan, task, encoder)
            run.write(report.add)
            report.send()
            if publishing is not None:
                connection.send(("done", publishing.result(), encoder.notice))
            publishing = publisher.submit(_publish, run)
            connection.send(("next",))
        if publishing is not None:
            connection.send(("done", publishing.result(), encoder.notice))
    except KeepstepError as error:
        with contextlib.suppress(ConnectionError):
            connection.send(("failed", type(error)(error.message, error.hint)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _publish(run: TaskRun) -> int:
    run.publish()
    return run.task


class _Reporter:
    """Reports a worker's progress to the parent a few times a second: each message wakes a process without a core."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._read_bytes = 0
        self._tokens = 0
        self._last_s = time.monotonic()

    def add(self, read_bytes: int, tokens: int) -> None:
        """Count, and send if it is time."""
        self._read_bytes += read_bytes
        self._tokens += tokens
        if time.monotonic() - self._last_s >= _REPORT_EVERY_S:
            self.send()

    def send(self) -> None:
        """Send the counts since the last message."""
        self._connection.send(("progress", self._read_bytes, self._tokens))
        self._read_bytes = self._tokens = 0
        self._last_s = time.monotonic()
