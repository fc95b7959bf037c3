"""The loss of a micro batch as a sum, so that processes and micro batches can share a global mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from keepstep.data.batch import Batch
from keepstep.models.transformer import Transformer


class ModelCall(Protocol):
    """Calls a model on a batch, as the run's step does."""

    def __call__(self, batch: Batch, *, model: Transformer | None = None, each_loss: bool = False) -> Tensor:
        """The sum of token losses of the trained model or another, or each of them [rows, tokens]."""


class Objective:
    """Next-token prediction: the mean cross-entropy of all tokens that have a target."""

    metric_names: tuple[str, ...] = ()
    """Metrics next to the loss."""
    sum_count = 0
    """Sums that the metrics are computed from."""
    best_is = "lowest validation loss"
    samples: Sequence[tuple[str, str]] = ()
    """Prompts and answers of the last micro batch, where the model wrote any."""
    prepares = False
    """Whether a step starts with work for all of its micro batches."""

    def count(self, batch: Batch) -> int:
        """What the mean loss counts: tokens here, pairs or answers elsewhere."""
        return batch.num_targets

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Called before a step with this process's micro batches, where their number decides no bits."""

    def sums(self, call: ModelCall, batch: Batch) -> Tensor:
        """The sum of losses and then `sum_count` others, fp32 [1 + sum_count]; only the first has a gradient."""
        return call(batch)[None]

    def to_minimise(self, loss: float, metrics: Mapping[str, float]) -> float:  # noqa: ARG002 - others need them
        """By what validations are compared, as `best_is` says."""
        return loss

    def metrics(self, sums: Tensor) -> Tensor:
        """The metrics of `metric_names` from the other sums over all micro batches; NaN where nothing was counted."""
        return sums
