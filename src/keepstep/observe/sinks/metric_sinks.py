"""Where a run's metrics go: a fan-out that never stops or slows training.

Each sink has a thread and a bounded queue of its own. Training only puts records into queues. A sink that fails costs a
warning and is tried again. A sink that blocks fills its own queue; records that do not fit are counted and dropped.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from keepstep.config.schema import ObserveConfig
from keepstep.core.errors import UsageError
from keepstep.core.ranks import Ranks
from keepstep.observe.history import History
from keepstep.observe.run_folder import JsonLines, Record, RunFolder
from keepstep.observe.sinks.trackers import MlflowSink, TensorBoardSink, WandbSink
from keepstep.observe.sinks.trainjob import URL_VARIABLE, TrainJobSink

METRICS, EVENT, RANKS, SAMPLE = "metrics", "event", "ranks", "sample"
QUEUE_RECORDS = 4096
UNWRITTEN_RECORDS = 100_000
"""Lines per file that are held in memory while the disk is full."""
COLUMNS_EVERY = 10_000
"""Metric lines after which the columns are stored again, so that a viewer parses at most this many lines."""
WARN_EVERY_S = 60.0
"""Seconds between two warnings about the same sink."""

Notice = Callable[[str], None]


class Sink(Protocol):
    """Takes records one at a time, in order, on a thread of its own. The fan-out catches any exception."""

    name: str

    def write(self, stream: str, record: Record) -> None:
        """Take one record of `stream`: metrics, event, ranks or sample."""

    def close(self) -> None:
        """Write what is buffered and release everything."""


class JsonlSink:
    """The files of the run folder, which every viewer of keepstep reads."""

    name = "run folder"

    def __init__(self, folder: RunFolder) -> None:
        paths = {METRICS: folder.metrics, EVENT: folder.events, RANKS: folder.ranks, SAMPLE: folder.samples}
        self._files = {stream: JsonLines(path) for stream, path in paths.items()}
        self._history = History(folder)
        self._lines = 0
        self._unwritten = {stream: deque[Record](maxlen=UNWRITTEN_RECORDS) for stream in self._files}

    def write(self, stream: str, record: Record) -> None:
        """Append one line to the stream's file; from time to time store the columns for viewers.

        Lines that a full disk refused are written, in order, as soon as it accepts them.
        """
        self._unwritten[stream].append(record)
        self._write_pending(stream)
        self._lines += stream == METRICS
        if self._lines >= COLUMNS_EVERY:
            self._lines = 0
            self._history.store_columns()

    def _write_pending(self, stream: str) -> None:
        records = self._unwritten[stream]
        while records:
            self._files[stream].append(records[0])
            records.popleft()

    def close(self) -> None:
        """Close the files; store the columns if the run is long enough to be slow to read."""
        try:
            for stream in self._files:
                self._write_pending(stream)
        finally:
            for file in self._files.values():
                file.close()
        if self._lines >= COLUMNS_EVERY // 10:
            self._history.store_columns()


def _print_notice(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class _SinkQueue:
    """One sink with its queue and its thread."""

    def __init__(self, sink: Sink, notice: Notice, capacity: int) -> None:
        self.sink = sink
        self.dropped = 0
        self.failed = 0
        self._notice = notice
        self._warned_at = -WARN_EVERY_S
        self._queue: queue.Queue[tuple[str, Record] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, stream: str, record: Record) -> None:
        try:
            self._queue.put_nowait((stream, record))
        except queue.Full:
            self.dropped += 1
            self._warn(f"{self.sink.name} does not keep up: {self.dropped} records dropped so far; training continues")

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            self._notice(text)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self.sink.write(*item)
            except Exception as error:  # no error of a sink may stop the run
                self.failed += 1
                self._warn(f"{self.sink.name} failed ({self.failed} times so far): {type(error).__name__}: {error}")
        try:
            self.sink.close()
        except Exception as error:
            self.failed += 1
            self._warn(f"{self.sink.name} did not close: {type(error).__name__}: {error}")

    def close(self, deadline: float) -> bool:
        try:
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


class MetricSinks:
    """Gives every record to every sink without waiting for any."""

    def __init__(self, sinks: Sequence[Sink], notice: Notice = _print_notice, capacity: int = QUEUE_RECORDS) -> None:
        self._queues = [_SinkQueue(sink, notice, capacity) for sink in sinks]
        self._notice = notice

    def metrics(self, record: Mapping[str, Any]) -> None:
        """The metrics of a step or a validation; `step` is required, `time` is added if it is missing."""
        self._put(METRICS, {"time": time.time(), **record})

    def event(self, kind: str, *, step: int | None = None, rank: int = 0, **facts: Any) -> None:
        """An event: start, resume, checkpoint_committed, save_skipped, fault, restart, resize, stop, finish ..."""
        self._put(EVENT, {"time": time.time(), "kind": kind, "step": step, "rank": rank, **facts})

    def ranks(self, record: Mapping[str, Any]) -> None:
        """A sample of all ranks: `step`, and lists by rank: `step_s`, `memory_gib`, `host`, `data_s`, `wait_s`."""
        self._put(RANKS, {"time": time.time(), **record})

    def sample(self, step: int, prompt: str, text: str, **facts: Any) -> None:
        """A text that the model generated."""
        self._put(SAMPLE, {"time": time.time(), "step": step, "prompt": prompt, "text": text, **facts})

    def _put(self, stream: str, record: Record) -> None:
        for sink_queue in self._queues:
            sink_queue.put(stream, record)

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped records by sink."""
        return {sink_queue.sink.name: sink_queue.dropped for sink_queue in self._queues}

    @property
    def failed(self) -> dict[str, int]:
        """Failed writes by sink."""
        return {sink_queue.sink.name: sink_queue.failed for sink_queue in self._queues}

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write the queued records and stop, within `timeout_s` in total; a sink that blocks is abandoned."""
        deadline = time.monotonic() + timeout_s
        closed = [sink_queue.close(deadline) for sink_queue in self._queues]
        for sink_queue, in_time in zip(self._queues, closed, strict=True):
            if not in_time:
                self._notice(f"{sink_queue.sink.name} did not finish within {timeout_s:g} s: records may be missing")
            if sink_queue.dropped:
                self._notice(f"{sink_queue.sink.name}: {sink_queue.dropped} records were dropped during the run")
        return all(closed)


def open_sinks(folder: RunFolder, *, tensorboard: bool = True, more: Sequence[Sink] = ()) -> MetricSinks:
    """The run's own files, TensorBoard if it is wanted and installed, and the sinks in `more`."""
    sinks: list[Sink] = [JsonlSink(folder)]
    if tensorboard:
        sinks += _try("TensorBoard", lambda: TensorBoardSink(folder.tensorboard))
    return MetricSinks([*sinks, *more])


def build_sinks(
    folder: RunFolder, options: ObserveConfig, ranks: Ranks, facts: Mapping[str, Any] | None = None
) -> MetricSinks | None:
    """The sinks of this process according to the configuration; None if it has none.

    Rank 0 has all of them. The first rank of every other node has Prometheus only, if that is on.
    `facts` (flat: model, batch size, learning rate ...) go to the experiment trackers.
    """
    more: list[Sink] = []
    if options.metrics_port and ranks.local_rank == 0:
        more += _try("Prometheus", lambda: _prometheus(folder, options, ranks))
    if not ranks.is_first:
        return MetricSinks(more) if more else None
    if options.wandb_project:
        more.append(_LazySink(WandbSink.name, lambda: WandbSink(folder, options.wandb_project, facts or {})))
    if options.mlflow_experiment:
        more.append(_LazySink(MlflowSink.name, lambda: MlflowSink(folder, options.mlflow_experiment, facts or {})))
    if os.environ.get(URL_VARIABLE):
        more += _try(TrainJobSink.name, lambda: TrainJobSink(folder))
    return open_sinks(folder, tensorboard=options.tensorboard, more=more)


class _LazySink:
    """A tracker that connects on its own thread: a server that does not answer must not delay a start or restart.

    Connecting may take minutes of retries; records wait in the queue meanwhile.
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
        """Pass the record on, unless the tracker could not connect."""
        for sink in self._open():
            sink.write(stream, record)

    def close(self) -> None:
        """Close the tracker if it is connected."""
        for sink in self._opened or []:
            sink.close()


def _prometheus(folder: RunFolder, options: ObserveConfig, ranks: Ranks) -> Sink:
    from keepstep.observe.access import Access
    from keepstep.observe.sinks.prometheus import Exporter, PrometheusSink

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
    """The sink, or nothing and a warning if it cannot start. A mistake in the configuration is still an error."""
    try:
        return [build()]
    except UsageError:
        raise
    except ImportError as error:
        print(f"notice: {name} is off: {error.name} is not installed (pip install {error.name})", file=sys.stderr)
    except Exception as error:
        print(f"warning: {name} is off: {type(error).__name__}: {error}", file=sys.stderr)
    return []
