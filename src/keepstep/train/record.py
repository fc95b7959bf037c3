"""From a step's bare numbers to what people and tools read: rates, MFU, memory, files, the progress line."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from keepstep.config.schema import ModelConfig, ObserveConfig
from keepstep.evaluate.perplexity import PerplexityResult
from keepstep.models.size import flops_per_token
from keepstep.observe.progress import Progress, Snapshot
from keepstep.observe.sinks import Sinks
from keepstep.train.rank_look import RankLook

TAIL_LINES = 8
SOURCES_A_LINE = 8
"""Positions in the data that a line holds on average, at most twice as many."""


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step when it starts it."""

    step: int
    samples: int
    tokens: int
    lr_share: float
    data_s: float
    loss_scale: float | None = None
    """What lifted this step's gradients; None where nothing does."""


@dataclass(frozen=True)
class Rates:
    """What turns tokens a second into a share of the machine."""

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
        """Model FLOP/s over the peak of all devices; None where nobody knows the peak."""
        return tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None


class Recorder:
    """Tells sinks and terminal about steps. Only the first process has any; the others count in silence."""

    positions: Callable[[int], dict[str, Any]] | None = None
    """How far each source of the data has been read after so many samples."""

    def __init__(
        self, config: ObserveConfig, rates: Rates, sinks: Sinks | None, progress: Progress | None, device: torch.device
    ) -> None:
        self._config = config
        self._rates = rates
        self._sinks = sinks
        self._progress = progress
        self._device = device
        self._ranks = dist.get_world_size()
        self._look = RankLook(config.rank_interval, self._ranks)
        self.last_saved_at: float | None = None
        self.last_loss: float | None = None
        """Loss of the newest step that was read, the same on every process."""
        self.blocked_s = 0.0
        """How long training stood still for saves since the last step that was told of."""
        self.tail: deque[dict[str, Any]] = deque(maxlen=TAIL_LINES)
        """The newest metric lines: saved with the state, because a kill may find them on their way to the file."""

    def meet(self, step: int) -> None:
        """Before a step is computed, on every process."""
        self._look.meet(step)

    def step_done(self, facts: StepFacts, step_s: float, loss: float, grad_norm: float) -> None:
        """A step's numbers have arrived."""
        self.last_loss = loss
        memory_gib = self._memory_gib()
        look = self._look.take(facts.step, step_s, facts.data_s, memory_gib)
        if self._sinks is None:
            return
        if look:
            self._sinks.ranks(look)
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
            "ranks": self._ranks,
            "loss_scale": facts.loss_scale,
            "sources": self._sources(facts),
        }
        self.blocked_s = 0.0
        line = {name: value for name, value in line.items() if value is not None}
        self.tail.append(line)
        self._sinks.metrics(line)
        if self._progress and facts.step % self._config.log_interval == 0:
            age_s = None if self.last_saved_at is None else time.time() - self.last_saved_at
            self._progress.update(
                Snapshot(
                    step=facts.step,
                    loss=loss,
                    grad_norm=grad_norm,
                    tokens_per_s=tokens_per_s,
                    mfu=mfu,
                    memory_gib=memory_gib,
                    checkpoint_age_s=age_s,
                )
            )

    def _sources(self, facts: StepFacts) -> dict[str, Any] | None:
        """Positions in the data. Those of many sources come less often: lines of a long run must stay short."""
        found = self.positions(facts.samples) if self.positions is not None else {}
        often = max(1, len(found) // SOURCES_A_LINE)
        return found if found and facts.step % often == 0 else None

    def validated(self, step: int, result: PerplexityResult) -> None:
        """A validation is done."""
        if self._sinks is None:
            return
        self._sinks.metrics(
            {"step": step, "time": time.time(), "valid_loss": result.loss, "valid_ppl": result.perplexity}
        )
        self.note(f"step {step}: validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """The model wrote a text."""
        if self._sinks is not None:
            self._sinks.sample(step, prompt, text)

    def complete(self, tail: Sequence[dict[str, Any]], recorded_step: int) -> None:
        """After a resume: write the lines of a saved `tail` that never reached the file."""
        self.tail.extend(tail)
        if self._sinks is not None:
            for line in tail:
                if line["step"] > recorded_step:
                    self._sinks.metrics(line)

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened that is not a step."""
        if self._sinks is not None:
            self._sinks.event(kind, **fields)

    def note(self, text: str) -> None:
        """A line for the person at the terminal."""
        if self._progress:
            logging.getLogger("keepstep").info(text)
            self._progress.note(text)

    def close(self) -> None:
        """Write out what is still under way."""
        if self._progress:
            self._progress.close()
        if self._sinks is not None:
            self._sinks.close()

    def _memory_gib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@cache
def measured_peak_flops(device: torch.device) -> float:
    """This machine's own matrix rate in fp32, for hardware that no table knows: the best of a few products."""
    size = 1024
    own = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=own) for _ in range(2))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
