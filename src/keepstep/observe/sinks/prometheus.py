"""Prometheus metrics of a run in the text format, from the first process of each node.

Metrics of the whole job come from the run's files, through the same functions as the page, and are computed when
Prometheus scrapes. Histograms and metrics of this node are updated with every record.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import get_args

import numpy as np

from keepstep.observe.access import Access, AccessServer, Answer, not_found
from keepstep.observe.goodput import account
from keepstep.observe.history import History
from keepstep.observe.run_folder import Record, RunFolder, number
from keepstep.observe.verdict import State, judge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
SAVE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
METRICS: Mapping[str, tuple[str, str]] = {
    "keepstep_step": ("gauge", "Optimizer steps done."),
    "keepstep_total_steps": ("gauge", "Optimizer steps of the whole run; absent if unknown."),
    "keepstep_loss": ("gauge", "Training loss of the newest step."),
    "keepstep_validation_loss": ("gauge", "Loss of the newest validation."),
    "keepstep_grad_norm": ("gauge", "Gradient norm of the newest step, before clipping."),
    "keepstep_learning_rate": ("gauge", "Learning rate of the newest step."),
    "keepstep_tokens_total": ("counter", "Tokens trained on; repeated steps count again."),
    "keepstep_samples_total": ("counter", "Rows trained on; repeated steps count again."),
    "keepstep_tokens_per_second": ("gauge", "Tokens per second over all ranks, newest step."),
    "keepstep_mfu_ratio": ("gauge", "Model FLOPs utilisation of the newest step, 0 to 1; absent if unknown."),
    "keepstep_expert_load_max_ratio": ("gauge", "Largest load of an expert over the mean of its layer, newest step."),
    "keepstep_expert_load_entropy_ratio": ("gauge", "Entropy of the experts' load, 1 if it is even, newest step."),
    "keepstep_expert_bias_max": ("gauge", "Largest magnitude of a router's bias."),
    "keepstep_data_wait_seconds": ("gauge", "Seconds the newest step waited for data."),
    "keepstep_memory_bytes": ("gauge", "Peak memory of the first rank."),
    "keepstep_last_step_timestamp_seconds": ("gauge", "When the newest step ended."),
    "keepstep_step_seconds": ("histogram", "Wall time of a step."),
    "keepstep_checkpoint_seconds": ("histogram", "Seconds from the start of a save to its commit."),
    "keepstep_checkpoint_age_seconds": ("gauge", "Seconds since the newest committed checkpoint."),
    "keepstep_checkpoint_bytes": ("gauge", "Size of the newest committed checkpoint."),
    "keepstep_checkpoints_total": ("counter", "Checkpoints committed."),
    "keepstep_at_risk_seconds": ("gauge", "Seconds of work that a crash now would lose."),
    "keepstep_restarts_total": ("counter", "Times the run resumed after an interruption."),
    "keepstep_faults_total": ("counter", "Faults of the run."),
    "keepstep_replicas_lost_total": ("counter", "Replicas that were lost while the others continued."),
    "keepstep_goodput_ratio": ("gauge", "Share of the wall clock spent in steps that count, 0 to 1."),
    "keepstep_wall_seconds": ("gauge", "Wall clock of the run by cause."),
    "keepstep_state": ("gauge", "1 for the current state of the run, 0 for the others."),
    "keepstep_ranks": ("gauge", "Number of training processes."),
    "keepstep_rank_step_seconds": ("gauge", "Step time of each rank of this node."),
    "keepstep_rank_memory_bytes": ("gauge", "Peak memory of each rank of this node."),
}
"""All metrics with type and meaning. Rules and dashboards may use only these."""


class Histogram:
    """Counts by upper bound, as Prometheus expects them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

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
    inside = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    shown = repr(value) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return f"{name}{{{inside}}} {shown}"


class Exporter:
    """Holds what a scrape needs. With `job` it covers the whole run, otherwise this node only."""

    def __init__(self, folder: RunFolder, *, job: bool, node: str, local_ranks: range) -> None:
        self._history = History(folder) if job else None
        self._labels = {"run": folder.name, "node": node}
        self._local_ranks = local_ranks
        self._steps, self._saves = Histogram(STEP_BUCKETS_S), Histogram(SAVE_BUCKETS_S)
        self._histograms = {"keepstep_step_seconds": self._steps, "keepstep_checkpoint_seconds": self._saves}
        self._ranks: Record = {}
        self._lock = threading.Lock()

    def take(self, stream: str, record: Record) -> None:
        """Update the metrics with a record."""
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
                for name, histogram in self._histograms.items():
                    samples[name] = [*histogram.lines(name, self._labels)]
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
        goodput = account(history, now)
        commits = [event for event in events if event.get("kind") == "checkpoint_committed"]
        values = {
            "keepstep_step": float(verdict.step),
            "keepstep_total_steps": float(verdict.total_steps) or math.nan,
            "keepstep_loss": verdict.loss,
            "keepstep_validation_loss": history.valid.last("valid_loss"),
            "keepstep_grad_norm": train.last("grad_norm"),
            "keepstep_learning_rate": train.last("lr"),
            "keepstep_tokens_total": _total_ever(history, "tokens"),
            "keepstep_samples_total": _total_ever(history, "samples"),
            "keepstep_tokens_per_second": train.last("tokens_per_s"),
            "keepstep_mfu_ratio": train.last("mfu"),
            "keepstep_expert_load_max_ratio": train.last("expert_load_max"),
            "keepstep_expert_load_entropy_ratio": train.last("expert_load_entropy"),
            "keepstep_expert_bias_max": train.last("expert_bias_max"),
            "keepstep_data_wait_seconds": train.last("data_s"),
            "keepstep_memory_bytes": train.last("memory_gib") * 2**30,
            "keepstep_last_step_timestamp_seconds": train.last("time"),
            "keepstep_checkpoint_age_seconds": verdict.checkpoint_age_s,
            "keepstep_checkpoint_bytes": number(commits[-1].get("bytes")) if commits else math.nan,
            "keepstep_checkpoints_total": float(len(commits)),
            "keepstep_at_risk_seconds": verdict.at_risk_s,
            "keepstep_restarts_total": float(verdict.restarts),
            "keepstep_faults_total": float(sum(event.get("kind") == "fault" for event in events)),
            "keepstep_replicas_lost_total": float(sum(event.get("kind") == "left" for event in events)),
            "keepstep_goodput_ratio": goodput.share,
            "keepstep_ranks": float(verdict.ranks),
        }
        # A NaN loss must be visible; any other NaN means that the value is unknown.
        yield from (
            (name, {}, value) for name, value in values.items() if not math.isnan(value) or name == "keepstep_loss"
        )
        for cause, spent in goodput.seconds.items():
            yield "keepstep_wall_seconds", {"cause": cause}, spent
        for state in get_args(State):
            yield "keepstep_state", {"state": state}, float(state == verdict.state)

    def _node(self) -> Iterable[tuple[str, dict[str, str], float]]:
        seconds, memory = self._ranks.get("step_s") or [], self._ranks.get("memory_gib") or []
        for rank in self._local_ranks:
            if rank < len(seconds):
                yield "keepstep_rank_step_seconds", {"rank": str(rank)}, number(seconds[rank])
            if rank < len(memory):
                yield "keepstep_rank_memory_bytes", {"rank": str(rank)}, number(memory[rank]) * 2**30


def _total_ever(history: History, name: str) -> float:
    """With rolled-back steps: a counter must never fall, because Prometheus takes that for a restart from 0."""
    return history.train.last(name) + float(np.nansum(history.rolled_back.column(name)))


class PrometheusSink(AccessServer):
    """Serves /metrics for Prometheus to scrape."""

    name = "Prometheus"

    def __init__(self, exporter: Exporter, access: Access) -> None:
        super().__init__(access)
        self._exporter = exporter
        self.start()

    def answer(self, path: str, query: dict[str, str]) -> Answer:  # noqa: ARG002 - the parent's signature
        """Serve the metrics and nothing else."""
        if path != "/metrics":
            return not_found("page (try /metrics)")
        return Answer(self._exporter.render(time.time()).encode(), CONTENT_TYPE)

    def write(self, stream: str, record: Record) -> None:
        """Update the metrics with a record."""
        self._exporter.take(stream, record)

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
