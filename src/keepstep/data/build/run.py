"""Who does which task: worker processes on one machine, or this machine's share of many.

A worker that dies is replaced and its task done again. Nothing is shared but the folder: whoever finds the last marker
in place writes the data set's own, and two who do write the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic, write_json
from keepstep.core.units import format_seconds
from keepstep.data.build.plan import (
    DATASET,
    REJECTS,
    STATE,
    TOKENIZER,
    Plan,
    open_tasks,
    read_marker,
    settle_plan,
)
from keepstep.data.fast import FastLoad

if TYPE_CHECKING:
    from keepstep.data.tokenize import Encoder

_DEATHS_ALLOWED = 3
_REPORT_EVERY_S = 0.2


@dataclass(frozen=True)
class Share:
    """This machine's part of the tasks: every `of`-th, starting with `number`."""

    number: int = 0
    of: int = 1


def build(
    folder: Path,
    plan: Plan,
    tokenizer: Path,
    *,
    workers: int,
    share: Share = Share(),  # noqa: B008
    loading: FastLoad | None = None,
) -> dict[str, Any] | None:
    """Do what is left of our share; the data set's facts, or None while others still work on theirs.

    `loading` is the fast encoder of the same tokenizer, where the caller began to load it earlier.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settle_plan(folder, plan, tokenizer)
    mine = list(range(share.number, len(plan.tasks), share.of))
    left = open_tasks(folder, mine)
    progress = Progress(_task_bytes(plan), left)
    if left:
        encoder = _load_encoder(folder, loading)
        count = min(workers, len(left))
        if count <= 1:
            _alone(folder, plan, left, encoder, progress)
        else:
            _Crew(folder, plan, left, encoder, progress).run(count)
    progress.end()
    return finish(folder, plan)


def _task_bytes(plan: Plan) -> list[int]:
    weights = [sum(max(1, piece.stop - piece.start) for piece in pieces) for pieces in plan.tasks]
    total = max(1, sum(weights))
    return [plan.input_bytes * weight // total for weight in weights]


def _load_encoder(folder: Path, loading: FastLoad | None = None) -> Encoder:
    # The fast encoder loads beside the import of numpy and the load of the exact one.
    loading = loading or FastLoad(folder / TOKENIZER)
    import keepstep.data.build.task  # noqa: F401 - before the fork
    from keepstep.data.tokenize import Encoder

    return Encoder(folder / TOKENIZER, fast=loading)


def _alone(folder: Path, plan: Plan, tasks: Sequence[int], encoder: Encoder, progress: Progress) -> None:
    from keepstep.data.build.task import run_task

    for task in tasks:
        run_task(folder, task, plan.tasks[task], plan.options, encoder, progress.add)
        progress.done(task)
        progress.notice(encoder.notice)


class _Crew:
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
        self._workers: dict[Connection, tuple[BaseProcess, int]] = {}

    def _hire(self) -> None:
        ours, theirs = self._context.Pipe()
        forked = self._encoder if self._context.get_start_method() == "fork" else None
        arguments = (theirs, self._folder, self._plan, forked, self._threads)
        process = self._context.Process(target=_work_on_tasks, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._hand_out(ours, process)

    def _hand_out(self, connection: Connection, process: BaseProcess) -> None:
        task = self._waiting.pop() if self._waiting else -1
        connection.send(task)
        if task < 0:
            self._workers.pop(connection, None)
            process.join()
            connection.close()
        else:
            self._workers[connection] = (process, task)

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
                    self._listen(ready)
        finally:
            for process, _ in self._workers.values():
                process.terminate()
                process.join()

    def _listen(self, connection: Connection) -> None:
        process, task = self._workers[connection]
        try:
            message = connection.recv()
        except EOFError:
            self._bury(connection, process, task)
            return
        match message:
            case ("progress", size_bytes, tokens):
                self._progress.add(size_bytes, tokens)
            case ("done", notice):
                self._progress.done(task)
                self._progress.notice(notice)
                self._hand_out(connection, process)
            case ("failed", error):
                raise error

    def _bury(self, connection: Connection, process: BaseProcess, task: int) -> None:
        del self._workers[connection]
        connection.close()
        process.join()
        self._deaths += 1
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self._deaths > _DEATHS_ALLOWED:
            raise DataError(
                f"{self._deaths} workers died, the last on task {task} ({how})",
                "memory may be short: use fewer --workers, then start the same command again",
            )
        self._progress.notice(f"a worker died on task {task} ({how}): doing the task again")
        self._waiting.append(task)
        self._hire()


def _work_on_tasks(connection: Connection, folder: Path, plan: Plan, encoder: Encoder | None, threads: int) -> None:
    """The life of a worker. A parent that dies closes the pipe, which ends us after the task at hand."""
    # Read when the exact tokenizer's thread pool starts, that is with the first batch.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    from keepstep.data.build.task import run_task

    report = _Reporter(connection)
    try:
        while (task := connection.recv()) >= 0:
            try:
                encoder = encoder or _load_encoder(folder)
                run_task(folder, task, plan.tasks[task], plan.options, encoder, report.add)
                report.send()
                connection.send(("done", encoder.notice))
            except DataError as error:
                connection.send(("failed", DataError(error.message, error.hint)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


class _Reporter:
    """Tells the parent how far a worker is, a few times a second: each message wakes a process that has no core."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._text_bytes = 0
        self._tokens = 0
        self._last_s = time.monotonic()

    def add(self, text_bytes: int, tokens: int) -> None:
        """Count, and send when it is time."""
        self._text_bytes += text_bytes
        self._tokens += tokens
        if time.monotonic() - self._last_s >= _REPORT_EVERY_S:
            self.send()

    def send(self) -> None:
        """Send what was counted since the last time."""
        self._connection.send(("progress", self._text_bytes, self._tokens))
        self._text_bytes = self._tokens = 0
        self._last_s = time.monotonic()


def finish(folder: Path, plan: Plan) -> dict[str, Any] | None:
    """Once every task is marked: the index, the rejects and dataset.json, whose presence says that all is whole."""
    markers = [read_marker(folder, task) for task in range(len(plan.tasks))]
    done = [marker for marker in markers if marker is not None]
    if len(done) < len(markers):
        return None
    if plan.options.format == "mds":
        from keepstep.data.formats.mds import write_index

        write_index(folder, [entry for marker in done for entry in marker["shards"]])
    samples = [{"task": marker["task"], **sample} for marker in done for sample in marker["reject_samples"]]
    write_atomic(folder / REJECTS, "".join(json.dumps(sample, sort_keys=True) + "\n" for sample in samples))
    facts = summarise(plan, done)
    write_json(folder / DATASET, facts)
    import shutil

    for leftover in (folder / STATE).glob("aside-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return facts


def summarise(plan: Plan, markers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The data set in numbers, from its tasks' own."""
    rejects, dropped = Counter[str](), Counter[str]()
    for marker in markers:
        rejects.update(marker["rejects"])
        dropped.update(marker["dropped"])
    return {
        "format": plan.options.format,
        "documents": sum(marker["documents"] for marker in markers),
        "samples": sum(marker["samples"] for marker in markers),
        "tokens": sum(marker["tokens"] for marker in markers),
        "input_bytes": plan.input_bytes,
        "tokenizer_sha256": plan.options.tokenizer_sha256,
        "bos": plan.options.bos,
        "eos": plan.options.eos,
        "concat": plan.options.concat,
        "tasks": len(markers),
        "rejects": dict(sorted(rejects.items())),
        "dropped": dict(sorted(dropped.items())),
        "files": [{**file, "task": marker["task"]} for marker in markers for file in marker["files"]],
    }


class Progress:
    """Lines on stderr: how far, how fast, how long still."""

    def __init__(self, task_bytes: Sequence[int], tasks: Sequence[int]) -> None:
        self._task_bytes = task_bytes
        self._total = sum(task_bytes[task] for task in tasks)
        self._tasks = len(tasks)
        self._tasks_done = 0
        self._bytes_done = 0
        self._text_bytes = 0
        self._tokens = 0
        self._start_s = time.monotonic()
        self._last_s = self._start_s
        self._terminal = sys.stderr.isatty()
        self._notices: set[str] = set()

    def add(self, text_bytes: int, tokens: int) -> None:
        """Count what a worker has read and written."""
        self._text_bytes += text_bytes
        self._tokens += tokens
        now_s = time.monotonic()
        if now_s - self._last_s >= (0.5 if self._terminal else 10.0):
            self._last_s = now_s
            self._print(now_s, "\r" if self._terminal else "")

    def done(self, task: int) -> None:
        """Count a finished task."""
        self._tasks_done += 1
        self._bytes_done += self._task_bytes[task]

    def notice(self, text: str) -> None:
        """Say something once."""
        if text and text not in self._notices:
            self._notices.add(text)
            print(f"notice: {text}", file=sys.stderr)

    def end(self) -> None:
        """The last line."""
        if self._tasks:
            self._print(time.monotonic(), "\r" if self._terminal else "")
            if self._terminal:
                print(file=sys.stderr)

    def _print(self, now_s: float, start: str) -> None:
        elapsed_s = max(1e-3, now_s - self._start_s)
        read = min(self._total, max(self._text_bytes, self._bytes_done))
        left_s = (self._total - read) * elapsed_s / max(1, read)
        print(
            f"{start}{self._tasks_done}/{self._tasks} tasks  {read / elapsed_s / 1e6:.1f} MB/s  "
            f"{self._tokens / elapsed_s / 1e6:.2f} M tokens/s  eta {format_seconds(left_s)}",
            end="" if start else "\n",
            file=sys.stderr,
            flush=True,
        )
