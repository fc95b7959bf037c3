"""One optimizer step: forward, backward, clip, update. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from keepstep.data.loader import Batch
from keepstep.models.documents import Bounds, are_few, document_bounds, longest_document
from keepstep.models.transformer import Transformer
from keepstep.parallel.context import own_part, row_positions
from keepstep.parallel.mesh import Grid
from keepstep.parallel.pipeline import Pipeline, Rows
from keepstep.train.gradients import HasGradient, clip_factor, gradient_norm
from keepstep.train.losses import count_targets
from keepstep.train.optimizer import Optimizers
from keepstep.train.scaler import LossScaler

LOSS, GRAD_NORM, STOP, SPENT_S, VOID, TARGETS = range(6)
"""Places in the vector that `TrainStep.run` returns."""


def own_seconds(spent_s: float) -> float:
    """What this process adds to the sum of seconds: the first one's clock is everybody's."""
    return spent_s if dist.get_rank() == 0 else 0.0


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know of the run."""

    grid: Grid
    device: torch.device
    clip: float
    loss_chunks: int
    reduce_each_microbatch: bool
    by_bounds: bool
    """Tell attention where documents start, in place of a mask."""
    may_mask: bool
    """Many short documents get a mask all the same; the flash kernel alone has no other way."""


class TrainStep:
    """Runs steps on one model; returns their numbers as a device vector that the caller reads later."""

    poison: Callable[[], bool] | None = None
    """For rehearsals of faults: asked once a step; True makes this process's gradients NaN."""

    def __init__(
        self,
        model: Transformer,
        optimizers: Optimizers,
        scaler: LossScaler,
        settings: StepSettings,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._settings = settings
        self._pipeline = pipeline

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self._settings.device

    @property
    def loss_scale(self) -> float | None:
        """What the next step's loss is multiplied by; None where the precision needs no such thing."""
        return self._scaler.scale if self._scaler.enabled else None

    def evaluate(self, batch: Batch) -> tuple[Tensor, int]:
        """The summed loss of this process's part of a micro batch, and its targets; zero where others count them."""
        part = self._own_part(batch)
        loss_sum = self._pipeline.evaluate(self._rows([part])) if self._pipeline else self._loss_sum(part)
        counted = self._settings.grid.counts_loss
        return (loss_sum, count_targets(part)) if counted else (torch.zeros_like(loss_sum), 0)

    def run(
        self,
        batches: Sequence[Batch],
        lr_share: float,
        stop: bool = False,
        before_update: Callable[[], None] = lambda: None,
        spent_s: float = 0.0,
        void: bool = False,
    ) -> Tensor:
        """Learn from this process's micro batches. `before_update` runs once weights are about to change.

        Nothing changes where loss or gradient norm are not finite, or where a process says that its part is `void`: it
        computes along only because the others do. The result holds the mean loss over the whole global batch, the
        gradient norm before clipping, whether any process asked to stop, the first one's `spent_s`, whether any part
        was void, and how many tokens had a target.
        """
        layout, counted = self._settings.grid.layout, self._settings.grid.counts_loss
        parts = [self._own_part(batch) for batch in batches]
        total_targets = self._sum_over_processes(float(sum(map(count_targets, parts))) if counted else 0.0)
        # FSDP averages gradients over the processes that hold the same weights; losses are sums, so this makes their
        # total the global mean.
        weight = self._poisoned(layout.replicate * layout.weight_shards * self._scaler.scale / total_targets)
        loss = self._learn(parts, weight) * float(counted)
        told = [torch.full_like(loss, value) for value in (float(stop), own_seconds(spent_s), float(void))]
        numbers = torch.stack([loss / total_targets, *told])
        dist.all_reduce(numbers)
        before_update()
        norm = self._update(lr_share, numbers[0].masked_fill(numbers[VOID - 1] > 0, torch.nan))
        return torch.stack([numbers[0], norm, *numbers[1:], total_targets])

    def _learn(self, parts: Sequence[Batch], weight: Tensor) -> Tensor:
        """Leave the gradients of the weighed loss of all micro batches; returns the plain sum of losses."""
        if self._pipeline is not None:
            return self._pipeline.train(self._rows(parts), weight)
        loss = torch.zeros((), device=self.device)
        for number, part in enumerate(parts):
            self._reduce_gradients(last=number == len(parts) - 1)
            loss_sum = self._loss_sum(part)
            torch.autograd.backward(loss_sum * weight)
            loss += loss_sum.detach()
            if len(parts) > 1:
                self._optimizers.add_up_gradients()
        return loss

    def _poisoned(self, weight: Tensor) -> Tensor:
        return weight * torch.nan if self.poison is not None and self.poison() else weight

    def _update(self, lr_share: float, loss: Tensor) -> Tensor:
        """Update the weights, unless loss or gradient are not finite; returns the gradient norm."""
        norm = self._gradient_norm() / self._scaler.scale
        factor = clip_factor(norm, self._settings.clip) if self._settings.clip else torch.ones_like(norm)
        # Optimizers leave everything as it is where this is NaN.
        factor = factor.masked_fill(~torch.isfinite(norm + loss), torch.nan)
        finite = self._scaler.is_finite(norm)
        if finite:
            self._optimizers.step(lr_share, factor / self._scaler.scale)
        self._scaler.update(finite)
        self._optimizers.zero_grad()
        return norm

    def _gradient_norm(self) -> Tensor:
        holders: Sequence[HasGradient] = self._optimizers.gradient_holders
        if self._pipeline is None:
            return gradient_norm(holders).to(self.device)
        own = self._pipeline.own_parameters(holders)
        return gradient_norm(own, self._settings.grid.pipeline_group).to(self.device)

    def _reduce_gradients(self, last: bool) -> None:
        """Shards are summed at each micro batch (whole gradients would not fit); replicas only once."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last or self._settings.reduce_each_microbatch)
            self._model.set_requires_all_reduce(last)

    def _sum_over_processes(self, value: float) -> Tensor:
        # full, not tensor: the latter copies from the host and waits for the device to get there.
        total = torch.full((), value, device=self._settings.device)
        dist.all_reduce(total)
        return total

    def _own_part(self, batch: Batch) -> Batch:
        grid = self._settings.grid
        return own_part(batch, grid.context_rank, grid.layout.context)

    def _loss_sum(self, batch: Batch) -> Tensor:
        loss: Tensor = self._model(
            self._to_device(batch.inputs),
            self._to_device(batch.targets),
            positions_bt=None if batch.positions is None else self._to_device(batch.positions),
            documents_bt=None if batch.documents is None else self._to_device(batch.documents),
            document_bounds=self._bounds(batch),
            loss_chunks=self._settings.loss_chunks,
        )
        return loss

    def _bounds(self, batch: Batch) -> Bounds | None:
        """Where documents lie; a row without any is one of its own where a sliding window would need a mask."""
        tokens, documents = batch.inputs.shape[1], batch.documents
        if documents is None and 0 < self._model.config.sliding_window < tokens:
            documents = np.zeros_like(batch.inputs)
        if documents is None or not self._settings.by_bounds:
            return None
        edges = document_bounds(documents)
        if self._settings.may_mask and not are_few(edges):
            return None
        return Bounds(self._to_device(edges), longest_document(edges, tokens))

    def _rows(self, parts: Sequence[Batch]) -> Rows:
        """Micro batches as a pipeline takes them: joined, with explicit positions, which later stages cannot tell."""
        documents = [part.documents for part in parts if part.documents is not None]
        return Rows(
            tokens=self._to_device(np.concatenate([part.inputs for part in parts])),
            targets=self._to_device(np.concatenate([part.targets for part in parts])),
            positions=self._to_device(np.concatenate([row_positions(part) for part in parts])),
            documents=self._to_device(np.concatenate(documents)) if documents else None,
        )

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._settings.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._settings.device, non_blocking=True)
