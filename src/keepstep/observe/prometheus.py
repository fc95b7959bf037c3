"""Prometheus metrics of a run, in the text format, from the first process of each node.

What is true of the whole job comes from the run's own files through the same functions the page uses, read only when
somebody scrapes; what only this process knows (how long each step took) is counted as records pass.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from keepstep.observe.access import Access, AccessServer, Answer, not_found
from keepstep.observe.folder import Record, RunFolder, number
from keepstep.observe.goodput import account
from keepstep.observe.history import History
from keepstep.observe.verdict import judge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
SAVE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
STATES = ("starting", "healthy", "degraded", "recovering", "stalled", "stopped", "failed", "finished")

METRICS: Mapping[str, tuple[str, str]] = {
    "keepstep_step": ("gauge", "Optimizer steps done."),
    "keepstep_total_steps": ("gauge", "Optimizer steps the run is to take; absent when unknown."),
    "keepstep_loss": ("gauge", "Training loss of the newest step."),
    "keepstep_validation_loss": ("gauge", "Loss of the newest validation."),
    "keepstep_grad_norm": ("gauge", "Gradient norm of the newest step, before clipping."),
    "keepstep_learning_rate": ("gauge", "Learning rate of the newest step."),
    "keepstep_tokens_total": ("counter", "Tokens trained on; those of steps done again count again."),
    "keepstep_samples_total": ("counter", "Rows trained on; those of steps done again count again."),
    "keepstep_tokens_per_second": ("gauge", "Tokens a second over all ranks, newest step."),
    "keepstep_mfu_ratio": ("gauge", "Model FLOPs utilisation of the newest step, 0 to 1."),
    "keepstep_data_wait_seconds": ("gauge", "Seconds the newest step waited for data."),
    "keepstep_memory_bytes": ("gauge", "Peak memory of the first rank."),
    "keepstep_last_step_timestamp_seconds": ("gauge", "When the newest step ended."),
    "keepstep_step_seconds": ("histogram", "Wall time of a step."),
    "keepstep_checkpoint_seconds": ("histogram", "Seconds from the start of a save to its commit."),
    "keepstep_checkpoint_age_seconds": ("gauge", "Seconds since the newest durable checkpoint."),
    "keepstep_checkpoint_bytes": ("gauge", "Size of the newest durable checkpoint."),
    "keepstep_checkpoints_total": ("counter", "Checkpoints committed."),
    "keepstep_at_risk_seconds": ("gauge", "Seconds of work that a crash now would lose."),
    "keepstep_restarts_total": ("counter", "Times the run went on after an interruption."),
    "keepstep_faults_total": ("counter", "Faults the run has met."),
    "keepstep_goodput_ratio": ("gauge", "Share of the wall clock spent in steps that count, 0 to 1."),
    "keepstep_wall_seconds": ("gauge", "Wall clock of the run by cause."),
    "keepstep_state": ("gauge", "1 for the state the run is in, 0 for the others."),
    "keepstep_ranks": ("gauge", "Processes that train."),
    "keepstep_rank_step_seconds": ("gauge", "Step time of each rank of this node."),
    "keepstep_rank_memory_bytes": ("gauge", "Peak memory of each rank of this node."),
}
"""Every metric there is: its type and what it means. Rules and dashboards may name only these."""


@dataclass
class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        if math.isfinite(value):
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """The buckets, cumulative, with sum and count."""
        running = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            yield sample(f"{name}_bucket", {**labels, "le": "+Inf" if bound == math.inf else f"{bound:g}"}, running)
        yield sample(f"{name}_sum", labels, self.total)
        yield sample(f"{name}_count", labels, running)


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """One line of the text format."""
    inside = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
    shown = (
        "NaN" if math.isnan(value) else "+Inf" if value == math.inf else "-Inf" if value == -math.inf else repr(value)
    )
    return f"{name}{{{inside}}} {shown}"


def escape(text: str) -> str:
    """A label value as the text format wants it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Exporter:
    """Keeps what a scrape needs. `job` says whether this process speaks for the whole run or for its node only."""

    def __init__(self, folder: RunFolder, *, job: bool, node: str, local_ranks: range) -> None:
        self._history = History(folder) if job else None
        self._labels = {"run": folder.name, "node": node}
        self._local_ranks = local_ranks
        self._steps, self._saves = Histogram(STEP_BUCKETS_S), Histogram(SAVE_BUCKETS_S)
        self._ranks: Record = {}
        self._lock = threading.Lock()

    def take(self, stream: str, record: Record) -> None:
        """Count a record that passes."""
        with self._lock:
            if stream == "metrics" and "step_s" in record:
                self._steps.observe(number(record["step_s"]))
            elif stream == "event" and record.get("kind") == "checkpoint_committed":
                self._saves.observe(number(record.get("seconds")))
            elif stream == "ranks":
                self._ranks = record

    def render(self, now: float) -> str:
        """All metrics as text."""
        samples: dict[str, list[str]] = {}
        with self._lock:
            if self._history is not None:
                for name, labels, value in self._job(self._history, now):
                    samples.setdefault(name, []).append(sample(name, {**self._labels, **labels}, value))
                samples["keepstep_step_seconds"] = [*self._steps.lines("keepstep_step_seconds", self._labels)]
                samples["keepstep_checkpoint_seconds"] = [
                    *self._saves.lines("keepstep_checkpoint_seconds", self._labels)
                ]
            for name, labels, value in self._node():
                samples.setdefault(name, []).append(sample(name, {**self._labels, **labels}, value))
        lines: list[str] = []
        for name, (kind, meaning) in METRICS.items():
            if name in samples:
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *samples[name]]
        return "\n".join(lines) + "\n"

    def _job(self, history: History, now: float) -> Iterable[tuple[str, dict[str, str], float]]:
        history.refresh()
        verdict, train, events = judge(history, now), history.train, history.events
        goodput = account(events, train, history.undone, now)
        commits = [event for event in events if event.get("kind") == "checkpoint_committed"]
        values = {
            "keepstep_step": float(verdict.step),
            "keepstep_total_steps": float(verdict.total_steps) or math.nan,
            "keepstep_loss": verdict.loss,
            "keepstep_validation_loss": history.valid.last("valid_loss"),
            "keepstep_grad_norm": train.last("grad_norm"),
            "keepstep_learning_rate": train.last("lr"),
            "keepstep_tokens_total": _ever_read(history, "tokens"),
            "keepstep_samples_total": _ever_read(history, "samples"),
            "keepstep_tokens_per_second": train.last("tokens_per_s"),
            "keepstep_mfu_ratio": train.last("mfu"),
            "keepstep_data_wait_seconds": train.last("data_s"),
            "keepstep_memory_bytes": train.last("memory_gib") * 2**30,
            "keepstep_last_step_timestamp_seconds": train.last("time"),
            "keepstep_checkpoint_age_seconds": verdict.checkpoint_age_s,
            "keepstep_checkpoint_bytes": number(commits[-1].get("bytes")) if commits else math.nan,
            "keepstep_checkpoints_total": float(len(commits)),
            "keepstep_at_risk_seconds": verdict.at_risk_s,
            "keepstep_restarts_total": float(verdict.restarts),
            "keepstep_faults_total": float(sum(event.get("kind") == "fault" for event in events)),
            "keepstep_goodput_ratio": goodput.share,
            "keepstep_ranks": float(verdict.ranks),
        }
        # A loss that is NaN is news; any other value that is NaN is merely not known.
        yield from (
            (name, {}, value) for name, value in values.items() if not math.isnan(value) or name == "keepstep_loss"
        )
        for cause, spent in goodput.seconds.items():
            yield "keepstep_wall_seconds", {"cause": cause}, spent
        for state in STATES:
            yield "keepstep_state", {"state": state}, float(state == verdict.state)

    def _node(self) -> Iterable[tuple[str, dict[str, str], float]]:
        seconds, memory = self._ranks.get("step_s") or [], self._ranks.get("memory_gib") or []
        for rank in self._local_ranks:
            if rank < len(seconds):
                yield "keepstep_rank_step_seconds", {"rank": str(rank)}, number(seconds[rank])
            if rank < len(memory):
                yield "keepstep_rank_memory_bytes", {"rank": str(rank)}, number(memory[rank]) * 2**30


def _ever_read(history: History, name: str) -> float:
    """A counter must never fall: Prometheus takes a lower value for a new beginning at 0 and adds all of it again."""
    return history.train.last(name) + float(np.nansum(history.undone.column(name)))


class _MetricsServer(AccessServer):
    def __init__(self, exporter: Exporter, access: Access) -> None:
        super().__init__(access)
        self._exporter = exporter

    def answer(self, path: str, query: dict[str, str]) -> Answer:  # noqa: ARG002 - the parent's signature
        """The metrics, and nothing else."""
        if path != "/metrics":
            return not_found("page (try /metrics)")
        return Answer(self._exporter.render(time.time()).encode(), CONTENT_TYPE)


class PrometheusSink:
    """Serves /metrics for Prometheus to scrape."""

    name = "Prometheus"

    def __init__(self, exporter: Exporter, access: Access) -> None:
        self._exporter = exporter
        self._server = _MetricsServer(exporter, access)
        self._server.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def write(self, stream: str, record: Record) -> None:
        """Count a record."""
        self._exporter.take(stream, record)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
