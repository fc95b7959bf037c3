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

from keepstep.config.layout import Layout
from keepstep.data.loader import Batch
from keepstep.models.transformer import Transformer
from keepstep.train.gradients import clip_factor, gradient_norm
from keepstep.train.losses import count_targets
from keepstep.train.optimizer import Optimizers
from keepstep.train.scaler import LossScaler

LOSS, GRAD_NORM, STOP = range(3)
"""Places in the vector that `TrainStep.run` returns."""


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know of the run."""

    layout: Layout
    device: torch.device
    clip: float
    loss_chunks: int
    reduce_each_microbatch: bool


class TrainStep:
    """Runs steps on one model; returns their numbers as a device vector that the caller reads later."""

    def __init__(self, model: Transformer, optimizers: Optimizers, scaler: LossScaler, settings: StepSettings) -> None:
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._settings = settings

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self._settings.device

    def loss_sum(self, batch: Batch) -> Tensor:
        """The summed loss of one micro batch."""
        loss: Tensor = self._model(
            self._to_device(batch.inputs),
            self._to_device(batch.targets),
            positions_bt=None if batch.positions is None else self._to_device(batch.positions),
            documents_bt=None if batch.documents is None else self._to_device(batch.documents),
            loss_chunks=self._settings.loss_chunks,
        )
        return loss

    def run(
        self,
        batches: Sequence[Batch],
        lr_share: float,
        stop: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Learn from this process's micro batches. `before_update` runs once weights are about to change.

        The result holds the mean loss over the whole global batch, the gradient norm before clipping, and whether
        any process asked to stop.
        """
        settings = self._settings
        total_targets = self._sum_over_processes(float(sum(count_targets(batch) for batch in batches)))
        # FSDP averages gradients over data ranks; losses are sums, so this makes their total the global mean.
        weight = settings.layout.data_ranks * settings.layout.tensor / total_targets
        loss = torch.zeros((), device=settings.device)
        for number, batch in enumerate(batches):
            self._reduce_gradients(last=number == len(batches) - 1)
            loss_sum = self.loss_sum(batch)
            torch.autograd.backward(loss_sum * (weight * self._scaler.scale))
            loss += loss_sum.detach()
            if len(batches) > 1:
                self._optimizers.add_up_gradients()
        before_update()
        norm = self._update(lr_share)
        numbers = torch.stack([loss / total_targets, torch.full_like(loss, float(stop))])
        dist.all_reduce(numbers)
        return torch.stack([numbers[0], norm, numbers[1]])

    def _update(self, lr_share: float) -> Tensor:
        norm = gradient_norm(self._optimizers.gradient_holders) / self._scaler.scale
        factor = clip_factor(norm, self._settings.clip) if self._settings.clip else torch.ones_like(norm)
        # fp16 alone pays for one look at the device: an overflow must not reach the weights.
        finite = bool(torch.isfinite(norm)) if self._scaler.enabled else True
        if finite:
            self._optimizers.step(lr_share, factor / self._scaler.scale)
        self._scaler.update(finite)
        self._optimizers.zero_grad()
        return norm

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

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._settings.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._settings.device, non_blocking=True)
