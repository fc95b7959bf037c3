"""From the numbers of a step to rates, MFU, memory, metric files and the progress line."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from keepstep.config.schema import ModelConfig, ObserveConfig
from keepstep.core.units import format_seconds
from keepstep.core.verbosity import debug
from keepstep.evaluate.perplexity import PerplexityResult
from keepstep.models.size import flops_per_token
from keepstep.observe.screen import Progress, StepMetrics
from keepstep.observe.sinks.metric_sinks import MetricSinks
from keepstep.train.telemetry.run_callbacks import RunCallbacks

TAIL_LINES = 8
CLOCK_JUMP_S = 60.0
"""A smaller correction of the machine's clock is not worth a warning."""
SOURCES_A_LINE = 8
"""Data sources whose positions a metric line holds on average, at most twice as many."""
RANK_FIELDS = ("step_s", "data_s", "memory_gib", "wait_s")


@dataclass(frozen=True)
class StepFacts:
    """What the host knows about a step when it starts."""

    step: int
    samples: int
    tokens: int
    lr_share: float
    data_s: float
    loss_scale: float | None = None
    """The factor of this step's loss; None without loss scaling."""


@dataclass(frozen=True)
class Rates:
    """What converts tokens per second into MFU."""

    tokens_per_step: int
    batch_size: int
    """Rows of one step over all processes."""
    flops_per_token: float
    peak_flops: float | None
    peak_lr: float

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        tokens_per_step: int,
        peak_flops: float | None,
        peak_lr: float,
        *,
        frozen: bool = False,
    ) -> Rates:
        """Rates of one model on one machine; `frozen` weights need no gradients."""
        flops = flops_per_token(model, model.seq_len, frozen=frozen)
        return cls(tokens_per_step, tokens_per_step // model.seq_len, flops, peak_flops, peak_lr)

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOP/s over the peak of all devices; None where the peak is unknown."""
        return tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None


def finite_only(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without metrics that a step had nothing to count for."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class Recorder:
    """Writes steps to sinks and terminal. Only the first process has these; the others take part in gathering."""

    def __init__(
        self,
        config: ObserveConfig,
        rates: Rates,
        sinks: MetricSinks | None,
        progress: Progress | None,
        device: torch.device,
        positions: Callable[[int], dict[str, Any]],
        callbacks: RunCallbacks,
    ) -> None:
        """`positions` says how far each data source has been read after so many samples."""
        self.callbacks = callbacks
        self._config = config
        self._rates = rates
        self._sinks = sinks
        self._progress = progress
        self._device = device
        self._positions = positions
        self.ranks = dist.get_world_size()
        """Processes that take part in a step."""
        self._rank_stats = RankStats(config.rank_interval, self.ranks)
        self.last_saved_at: float | None = None
        self._clock_offset_s = time.time() - time.monotonic()
        self.last_loss: float | None = None
        """Loss of the newest step that was read, the same on every process."""
        self.blocked_s = 0.0
        """Seconds that training waited for saves since the last recorded step."""
        self.skipped_saves = 0
        """Saves that were due, failed, and were not made up for."""
        self.tail: deque[dict[str, Any]] = deque(maxlen=TAIL_LINES)
        """The newest metric lines. They are saved with the state: a kill may come before they reach the file."""

    def lead(self, sinks: MetricSinks | None, progress: Progress | None, recorded_step: int) -> None:
        """This process writes for all from now on, starting with what its predecessor could not write any more."""
        self._sinks, self._progress = sinks, progress
        self._write_missing(list(self.tail), recorded_step)

    def before_step(self, step: int) -> None:
        """Called on every process before a step is computed."""
        self._rank_stats.measure_wait(step)

    def step_done(
        self, facts: StepFacts, step_s: float, loss: float, grad_norm: float, metrics: Mapping[str, float]
    ) -> None:
        """A step's numbers have arrived, with the `metrics` that `TrainStep.metric_names` names."""
        self.last_loss = loss
        memory_gib = self._memory_gib()
        ranks = self._rank_stats.gather(facts.step, step_s, facts.data_s, memory_gib)
        if self._sinks is not None and ranks:
            self._sinks.ranks(ranks)
        self._check_clock(facts.step)
        tokens_per_s = self._rates.tokens_per_step / max(step_s, 1e-9)
        mfu = self._rates.mfu(tokens_per_s)
        line: dict[str, Any] = {
            "step": facts.step,
            "time": time.time(),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self._rates.peak_lr * facts.lr_share,
            "tokens": facts.tokens,
            "samples": facts.samples,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu,
            "step_s": step_s,
            "data_s": facts.data_s,
            "memory_gib": memory_gib,
            "save_s": self.blocked_s,
            "batch_size": self._rates.batch_size,
            "ranks": self.ranks,
            "loss_scale": facts.loss_scale,
            "sources": self._sources(facts),
            "skipped_saves": self.skipped_saves or None,
            **finite_only(metrics),
        }
        self.blocked_s = 0.0
        line = {name: value for name, value in line.items() if value is not None}
        self.tail.append(line)
        if self._sinks is None:
            return
        self._sinks.metrics(line)
        self.callbacks.step(facts.step, line)
        if self._progress and facts.step % self._config.log_interval == 0:
            age_s = None if self.last_saved_at is None else time.monotonic() - self.last_saved_at
            self._progress.update(
                StepMetrics(
                    step=facts.step,
                    loss=loss,
                    grad_norm=grad_norm,
                    tokens_per_s=tokens_per_s,
                    mfu=mfu,
                    memory_gib=memory_gib,
                    checkpoint_age_s=age_s,
                )
            )

    def _check_clock(self, step: int) -> None:
        """Report that the machine's clock was set: times before and after do not fit together."""
        jump_s = time.time() - time.monotonic() - self._clock_offset_s
        if abs(jump_s) > CLOCK_JUMP_S:
            self._clock_offset_s += jump_s
            by = f"{'forward' if jump_s > 0 else 'back'} by {format_seconds(abs(jump_s))}"
            message = f"the clock of this machine was set {by}; durations that include this moment are wrong"
            self.event("warning", step=step, reason="clock_set", message=message, seconds=jump_s)
            self.note(f"warning: {message}")

    def _sources(self, facts: StepFacts) -> dict[str, Any] | None:
        """Positions in the data; less often where there are many sources, so that metric lines stay short."""
        found = self._positions(facts.samples)
        often = max(1, len(found) // SOURCES_A_LINE)
        return found if found and facts.step % often == 0 else None

    def validated(self, step: int, result: PerplexityResult) -> None:
        """A validation is done."""
        if self._sinks is None:
            return
        # Perplexity is that of next tokens; other objectives have metrics of their own.
        others = finite_only(result.metrics)
        shown = {f"valid_{name}": value for name, value in others.items()} or {"valid_ppl": result.perplexity}
        line = {"step": step, "time": time.time(), "valid_loss": result.loss, **shown}
        self._sinks.metrics(line)
        self.callbacks.evaluation(step, line)
        told = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in others.items()]
        told = told or [f"perplexity {result.perplexity:.2f}"]
        self.note(f"step {step}: validation loss {result.loss:.4f}, {', '.join(told)}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """A text that the model wrote."""
        if self._sinks is not None:
            self._sinks.sample(step, prompt, text)

    def complete(self, tail: Sequence[dict[str, Any]], recorded_step: int) -> None:
        """After a resume: write the lines of a saved `tail` that never reached the file."""
        self.tail.extend(tail)
        self._write_missing(tail, recorded_step)

    def _write_missing(self, tail: Sequence[dict[str, Any]], recorded_step: int) -> None:
        if self._sinks is not None:
            for line in tail:
                if line["step"] > recorded_step:
                    self._sinks.metrics(line)

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened that is not a step."""
        debug(f"event {kind}: {fields}")
        if self._sinks is not None:
            self._sinks.event(kind, **fields)

    def note(self, text: str) -> None:
        """A line for the person at the terminal."""
        if self._progress:
            logging.getLogger("keepstep").info(text)
            self._progress.note(text)

    def close(self) -> None:
        """Write what is still queued."""
        if self._progress:
            self._progress.close()
        if self._sinks is not None:
            self._sinks.close()

    def _memory_gib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass
class _Pending:
    """Statistics that are being gathered."""

    step: int
    rows: list[torch.Tensor]
    work: Any


class RankStats:
    """All ranks call `gather` for the same steps, in the same order."""

    def __init__(self, interval_steps: int, ranks: int) -> None:
        self._interval = interval_steps
        self._ranks = ranks
        self._hosts: list[str] = [""] * ranks
        self._pending: _Pending | None = None
        self._wait_s = 0.0
        if interval_steps:
            dist.all_gather_object(self._hosts, socket.gethostname())

    def measure_wait(self, step: int) -> None:
        """Before step `step`, on every rank: measure how long this rank waits for the others, where it is due."""
        if not self._interval or step % self._interval or self._ranks == 1:
            return
        started = time.perf_counter()
        dist.all_reduce(torch.zeros(1))
        self._wait_s = time.perf_counter() - started

    def gather(self, step: int, step_s: float, data_s: float, memory_gib: float) -> dict[str, Any] | None:
        """Start to gather where it is due; returns the statistics gathered before."""
        if not self._interval or step % self._interval:
            return None
        done = self._finish()
        mine = torch.tensor([step_s, data_s, memory_gib, self._wait_s], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending = _Pending(step, rows, dist.all_gather(rows, mine, async_op=True))
        return done

    def _finish(self) -> dict[str, Any] | None:
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        pending.work.wait()
        columns = torch.stack(pending.rows).T.tolist()
        return {"step": pending.step, "host": self._hosts, **dict(zip(RANK_FIELDS, columns, strict=True))}
