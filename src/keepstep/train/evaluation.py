"""Evaluation during a run: validation loss, best weights and sample texts.

Validation uses the same rows each time, so that its losses can be compared along the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.core.errors import CheckpointError
from keepstep.data.batch import Batch
from keepstep.data.loader import Loader, Loaders
from keepstep.evaluate.perplexity import PerplexityResult, exponential
from keepstep.interop.run_source import BEST_FOLDER
from keepstep.train.context import RunContext
from keepstep.train.objectives.objective import Objective
from keepstep.train.recovery.best_weights import BestWeights
from keepstep.train.state import TrainState
from keepstep.train.step import TrainStep
from keepstep.train.telemetry.recorder import Recorder
from keepstep.train.telemetry.samples import Prompts


@dataclass(frozen=True)
class ValidationRows:
    """Which rows, and how this process shares them with the others."""

    loader: Loader
    rows: int
    microbatch: int
    data_rank: int
    data_ranks: int


class Evaluation:
    """Evaluates the model as it is after the step just done."""

    def __init__(self, context: RunContext, loaders: Loaders, recorder: Recorder) -> None:
        config = context.config
        self._context, self._recorder = context, recorder
        self._prompts = Prompts.of(config.evaluate, config.model, loaders.tokenizer)
        self._rows = _validation_rows(context, loaders.valid) if loaders.valid is not None else None
        self.best = BestWeights(context.folder.root / BEST_FOLDER, config.evaluate, context.leases.fence)

    def run(self, state: TrainState, step: TrainStep) -> bool:
        """Measure the validation loss and write sample texts; False where a stop request cut this short."""
        started = time.perf_counter()
        result = None
        if self._rows is not None:
            result = self._validate(self._rows, state, step)
            if result is None:
                return False
        elif self._prompts is None:
            self._recorder.note("notice: no validation data: evaluation is skipped")
            return True
        self._write_samples(state)
        self._recorder.event("evaluate", step=state.clock.step, seconds=time.perf_counter() - started)
        if result is not None:
            self._offer_best(result, state, step.objective)
        return True

    def _validate(self, rows: ValidationRows, state: TrainState, step: TrainStep) -> PerplexityResult | None:
        state.model.eval()
        device, objective = self._context.world.device, step.objective
        result = validate(step.evaluate, rows, device, lambda: self._context.stop.requested, objective)
        state.model.train()
        if result is None:
            self._recorder.note(f"step {state.clock.step}: stop requested, validation is left for the next start")
            return None
        self._recorder.validated(state.clock.step, result)
        for prompt, text in objective.samples:
            self._recorder.sample(state.clock.step, prompt, text)
        return result

    def _write_samples(self, state: TrainState) -> None:
        if self._prompts is None:
            return
        state.model.eval()
        device, stop = self._context.world.device, self._context.stop
        for prompt, text in self._prompts.continued(state.model, device, lambda: stop.requested):
            self._recorder.sample(state.clock.step, prompt, text)
        state.model.train()

    def _offer_best(self, result: PerplexityResult, state: TrainState, objective: Objective) -> None:
        step = state.clock.step
        try:
            measured = objective.to_minimise(result.loss, result.metrics)
            saved = self.best.offer(step, measured, state.weights, state.origin, write=self._context.saves)
        except CheckpointError as error:
            # A full disk, for example. The run is worth more than this copy, and its own saves continue.
            self._recorder.event("warning", step=step, reason="best_failed", message=error.message)
            self._recorder.note(f"warning: the best weights so far are not saved: {error.message}")
            return
        if saved:
            self._recorder.note(f"step {step}: {objective.best_is} so far, weights saved as {BEST_FOLDER}")


def _validation_rows(context: RunContext, valid: Loader) -> ValidationRows:
    config, mesh = context.config, context.mesh
    return ValidationRows(
        loader=valid,
        rows=min(config.evaluate.batches * config.global_batch, valid.samples_per_epoch),
        microbatch=config.microbatch,
        data_rank=mesh.data_rank,
        data_ranks=mesh.layout.data_ranks,
    )


def validate(
    forward: Callable[[Batch], tuple[Tensor, int]],
    share: ValidationRows,
    device: torch.device,
    stop_requested: Callable[[], bool] = lambda: False,
    objective: Objective = Objective(),  # noqa: B008 - without a state
) -> PerplexityResult | None:
    """Every process computes its rows; all of them return the same result.

    `forward` returns the sums of the objective and what its mean counts; of processes that compute one sum together,
    only one counts it. None where a process was asked to stop: a validation may take longer than a scheduler waits.
    """
    # A place for each micro batch and one sum in order: the same bits however many processes share the work.
    places = -(-share.rows // share.microbatch)
    totals = torch.zeros(2 + objective.sum_count, places, dtype=torch.float64, device=device)
    stride = share.microbatch * share.data_ranks
    with torch.no_grad():
        # All processes run the same number of forwards, because they gather sharded weights together. Rows past the
        # end carry no weight.
        for start in range(0, share.rows, stride):
            stop = torch.tensor(float(stop_requested()))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                return None
            first = start + share.data_rank * share.microbatch
            count = max(0, min(share.microbatch, share.rows - first))
            batch = share.loader.rows(min(first, share.rows - 1), max(1, count))
            sums, targets = forward(batch)
            if count:
                number = first // share.microbatch
                totals[0, number] = targets
                totals[1:, number] = sums
    dist.all_reduce(totals)
    targets_all, loss_sum_all, *_ = (sums_all := totals.sum(dim=1)).tolist()
    loss = loss_sum_all / max(1.0, targets_all)
    metrics = dict(zip(objective.metric_names, objective.metrics(sums_all[2:]).tolist(), strict=True))
    return PerplexityResult(loss, exponential(loss), int(targets_all), metrics)
