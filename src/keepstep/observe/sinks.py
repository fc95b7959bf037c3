"""Where a run's numbers go: a fan-out that can never stop or slow the training it reports on.

Each sink has a thread and a bounded queue of its own. Training only ever puts a record into a queue. A sink that fails
is told of once and tried again; one that blocks fills its own queue, and what does not fit is counted and dropped.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from keepstep.config.schema import ObserveConfig
from keepstep.core.errors import UsageError
from keepstep.core.ranks import Ranks
from keepstep.observe.folder import JsonLines, Record, RunFolder
from keepstep.observe.history import History

METRICS, EVENT, RANKS, SAMPLE = "metrics", "event", "ranks", "sample"
QUEUE_RECORDS = 4096
COLUMNS_EVERY = 10_000
"""Metric lines after which the columns are kept again: a viewer parses at most so many lines of a run."""
TELL_EVERY_S = 60.0
"""Seconds between two notices about the same sink."""

Notice = Callable[[str], None]


class Sink(Protocol):
    """Takes records one at a time, in order, on a thread of its own. Any exception is caught by the fan-out."""

    name: str

    def write(self, stream: str, record: Record) -> None:
        """Take one record of `stream`: metrics, event, ranks or sample."""

    def flush(self) -> None:
        """Push what is buffered outward."""

    def close(self) -> None:
        """Flush and release everything."""


class JsonlSink:
    """The run folder's own files. Everything keepstep shows is read from these."""

    name = "run folder"

    def __init__(self, folder: RunFolder) -> None:
        self._files = {
            METRICS: JsonLines(folder.metrics),
            EVENT: JsonLines(folder.events),
            RANKS: JsonLines(folder.ranks),
            SAMPLE: JsonLines(folder.samples),
        }
        self._history = History(folder)
        self._lines = 0

    def write(self, stream: str, record: Record) -> None:
        """Append one line to the stream's file; every so often keep the columns for viewers."""
        self._files[stream].append(record)
        self._lines += stream == METRICS
        if self._lines >= COLUMNS_EVERY:
            self._keep_columns()

    def _keep_columns(self) -> None:
        self._lines = 0
        self._history.keep_columns()

    def flush(self) -> None:
        """Nothing is held back: each line was written whole."""

    def close(self) -> None:
        """Close the files; a run long enough to be slow to read leaves its columns."""
        for file in self._files.values():
            file.close()
        if self._lines >= COLUMNS_EVERY // 10:
            self._keep_columns()


def _print_notice(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class _Lane:
    """One sink with its queue and its thread."""

    def __init__(self, sink: Sink, notice: Notice, capacity: int) -> None:
        self.sink = sink
        self.dropped = 0
        self.failed = 0
        self._notice = notice
        self._told_at = -TELL_EVERY_S
        self._queue: queue.Queue[tuple[str, Record] | threading.Event | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, stream: str, record: Record) -> None:
        try:
            self._queue.put_nowait((stream, record))
        except queue.Full:
            self.dropped += 1
            self._tell(f"{self.sink.name} does not keep up: {self.dropped} records dropped, training goes on")

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            self._notice(text)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    self.sink.flush()
                else:
                    self.sink.write(*item)
            except Exception as error:  # a sink is never a reason to stop: whatever it raises is told and survived
                self.failed += 1
                self._tell(f"{self.sink.name} fails ({self.failed} times so far): {type(error).__name__}: {error}")
            finally:
                if isinstance(item, threading.Event):
                    item.set()
        try:
            self.sink.close()
        except Exception as error:
            self.failed += 1
            self._tell(f"{self.sink.name} did not close: {type(error).__name__}: {error}")

    def flush(self, deadline: float) -> bool:
        done = threading.Event()
        try:
            self._queue.put(done, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        return done.wait(max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> bool:
        try:
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


class Sinks:
    """Hands every record to every sink without ever waiting for one."""

    def __init__(self, sinks: Sequence[Sink], notice: Notice = _print_notice, capacity: int = QUEUE_RECORDS) -> None:
        self._lanes = [_Lane(sink, notice, capacity) for sink in sinks]
        self._notice = notice

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One step's numbers (`step` is required), or one validation's; `time` is added where it is missing."""
        self._put(METRICS, {"time": time.time(), **record})

    def event(self, kind: str, *, step: int | None = None, rank: int = 0, **facts: Any) -> None:
        """Something happened: start, resume, checkpoint_committed, fault, restart, resize, stop, finish, warning."""
        self._put(EVENT, {"time": time.time(), "kind": kind, "step": step, "rank": rank, **facts})

    def ranks(self, record: Mapping[str, Any]) -> None:
        """A look at all ranks: `step`, and lists by rank `step_s`, `memory_gib`, `host`, perhaps `data_s`, `wait_s`."""
        self._put(RANKS, {"time": time.time(), **record})

    def sample(self, step: int, prompt: str, text: str, **facts: Any) -> None:
        """A text the model wrote."""
        self._put(SAMPLE, {"time": time.time(), "step": step, "prompt": prompt, "text": text, **facts})

    def _put(self, stream: str, record: Record) -> None:
        for lane in self._lanes:
            lane.put(stream, record)

    @property
    def dropped(self) -> dict[str, int]:
        """Records that did not fit, by sink."""
        return {lane.sink.name: lane.dropped for lane in self._lanes}

    @property
    def failed(self) -> dict[str, int]:
        """Writes that raised, by sink."""
        return {lane.sink.name: lane.failed for lane in self._lanes}

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was put is written, at most `timeout_s` in all; False when a sink did not make it."""
        deadline = time.monotonic() + timeout_s
        flushed = [lane.flush(deadline) for lane in self._lanes]
        return all(flushed)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what is queued and stop, waiting at most `timeout_s` in all; a sink that blocks is left behind."""
        deadline = time.monotonic() + timeout_s
        closed = [lane.close(deadline) for lane in self._lanes]
        for lane, whole in zip(self._lanes, closed, strict=True):
            if not whole:
                self._notice(f"{lane.sink.name} did not finish within {timeout_s:g} s and was left behind")
            if lane.dropped:
                self._notice(f"{lane.sink.name}: {lane.dropped} records were dropped during the run")
        return all(closed)


def open_sinks(folder: RunFolder, *, tensorboard: bool = True, more: Sequence[Sink] = ()) -> Sinks:
    """A run's own files, TensorBoard where wanted and installed, and whatever is in `more`."""
    sinks: list[Sink] = [JsonlSink(folder)]
    if tensorboard:
        from keepstep.observe.tensorboard import TensorBoardSink

        sinks += _try("TensorBoard", lambda: TensorBoardSink(folder.tensorboard))
    return Sinks([*sinks, *more])


def build_sinks(
    folder: RunFolder, options: ObserveConfig, ranks: Ranks, facts: Mapping[str, Any] | None = None
) -> Sinks | None:
    """The sinks of this process by the run's configuration: None where it has nothing to tell.

    The first process has all of them. The first process of every other node has Prometheus only, where that is on.
    `facts` (flat: model, batch size, learning rate ...) go to the experiment trackers.
    """
    more: list[Sink] = []
    if options.metrics_port and ranks.local_rank == 0:
        more += _try("Prometheus", lambda: _prometheus(folder, options, ranks))
    if not ranks.is_first:
        return Sinks(more) if more else None
    if options.wandb_project:
        from keepstep.observe.trackers import WandbSink

        more.append(_Later(WandbSink.name, lambda: WandbSink(folder, options.wandb_project, facts or {})))
    if options.mlflow_experiment:
        from keepstep.observe.trackers import MlflowSink

        more.append(_Later(MlflowSink.name, lambda: MlflowSink(folder, options.mlflow_experiment, facts or {})))
    return open_sinks(folder, tensorboard=options.tensorboard, more=more)


class _Later:
    """A tracker that opens on its own thread: a server that does not answer must not hold up a start, or a restart.

    Opening one asks its server and tries again for minutes; what comes in the meantime waits in the queue.
    """

    def __init__(self, name: str, build: Callable[[], Sink]) -> None:
        self.name = name
        self._build = build
        self._opened: list[Sink] | None = None

    def _open(self) -> list[Sink]:
        if self._opened is None:
            self._opened = _try(self.name, self._build)
        return self._opened

    def write(self, stream: str, record: Record) -> None:
        """Hand the record on; nowhere where the tracker could not open."""
        for sink in self._open():
            sink.write(stream, record)

    def flush(self) -> None:
        """Push what is buffered outward."""
        for sink in self._open():
            sink.flush()

    def close(self) -> None:
        """Close what was opened."""
        for sink in self._opened or []:
            sink.close()


def _prometheus(folder: RunFolder, options: ObserveConfig, ranks: Ranks) -> Sink:
    from keepstep.observe.access import Access
    from keepstep.observe.prometheus import Exporter, PrometheusSink

    here = range(ranks.rank, ranks.rank + ranks.local_world_size)
    exporter = Exporter(folder, job=ranks.is_first, node=socket.gethostname(), local_ranks=here)
    token = os.environ.get("KEEPSTEP_METRICS_TOKEN", "")
    try:
        access = Access(options.metrics_host, options.metrics_port, token)
    except UsageError as error:
        hint = "set KEEPSTEP_METRICS_TOKEN to 16 characters or more, or observe.metrics_host=127.0.0.1"
        raise UsageError(f"observe.metrics_host: {error.message}", hint) from None
    return PrometheusSink(exporter, access)


def _try(name: str, build: Callable[[], Sink]) -> list[Sink]:
    """A sink that cannot start costs a notice, not the run. A mistake in the configuration is still an error."""
    try:
        return [build()]
    except UsageError:
        raise
    except ImportError as error:
        print(f"notice: no {name}: the package {error.name} is missing (pip install {error.name})", file=sys.stderr)
    except Exception as error:
        print(f"warning: no {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return []
