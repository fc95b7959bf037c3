"""One optimizer step: forward, backward, clip, update. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from keepstep.data.batch import Batch
from keepstep.models.moe import ROUTER_METRICS, router_biases, router_health, routers
from keepstep.models.ops.varlen_attention import VarlenSpans, cu_seqlens_of, fits_varlen_kernel, max_seqlen_of
from keepstep.models.transformer import Transformer
from keepstep.parallel.context import own_part, row_positions
from keepstep.parallel.mesh import ParallelMesh
from keepstep.parallel.pipeline import Pipeline, Rows
from keepstep.resilience.survivors.replica import Replica
from keepstep.train.objectives.objective import Objective
from keepstep.train.optim.gradients import HasGradient, clip_factor, gradient_norm
from keepstep.train.optim.loss_scaler import LossScaler
from keepstep.train.optim.optimizer import Optimizers

LOSS, GRAD_NORM, STOP, SPENT_S, VOID, TARGETS = range(6)
"""Places in the vector that `TrainStep.run` returns; those of `TrainStep.metric_names` follow."""


def own_seconds(spent_s: float) -> float:
    """What this process adds to the sum of seconds: only the first process's clock counts."""
    return spent_s if dist.get_rank() == 0 else 0.0


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know about the run."""

    mesh: ParallelMesh
    device: torch.device
    clip: float
    loss_chunks: int
    reduce_each_microbatch: bool
    use_varlen: bool
    """Use variable-length attention for packed documents, in place of a mask."""
    may_mask: bool
    """Whether rows with many short documents may use a mask all the same."""
    fused_varlen: bool = False
    """Packed documents and sliding windows use our own backward kernels, in blocks that they fit."""
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class StepSignals:
    """What this process reports to the others with a step, and how a step is abandoned."""

    step: int = 0
    """The number of the step."""
    stop: bool = False
    """Whether this process was asked to stop."""
    spent_s: float = 0.0
    """Seconds since the last report; only those of the first process count."""
    void: bool = False
    """Whether this process has no data and only computes along, because the others do."""
    abandon: Callable[[int, int], bool] = lambda _number, _count: False
    """Called on every process before micro batch `number` of `count`; True, on all of them, abandons the step."""


class TrainStep:
    """Runs steps on one model; returns their numbers as a device vector that the caller reads later."""

    poison: Callable[[], bool] | None = None
    """For fault injection: called once a step; True makes this process's gradients NaN."""
    replica: Replica | None = None
    """Where replicas outlive each other (elastic steps only): what sums over them, in place of the process group."""

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
        self._routers = dict(routers(model))
        self._router_health = torch.empty(0, device=settings.device)

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self._settings.device

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next step's loss; None where the precision needs no loss scaling."""
        return self._scaler.scale if self._scaler.enabled else None

    @property
    def objective(self) -> Objective:
        """What the run learns."""
        return self._settings.objective

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics next to the loss: the objective's, and those of routers if there are experts."""
        return self.objective.metric_names + (ROUTER_METRICS if self._model.config.expert_layers else ())

    def evaluate(self, batch: Batch) -> tuple[Tensor, int]:
        """The objective's sums over this process's part of a micro batch, and what its mean counts.

        Zero where others count them.
        """
        part = self._own_part(batch)
        sums = self._pipeline.evaluate(self._rows([part]))[None] if self._pipeline else self._sums(part)
        counted = self._settings.mesh.counts_loss
        return (sums, self.objective.count(part)) if counted else (torch.zeros_like(sums), 0)

    def join(self, replica: Replica) -> None:
        """From now on, sum over replicas that outlive each other."""
        self.replica = replica

    def warm_up(self, batch: Batch) -> None:
        """Do ahead of time what only the first micro batch does; nothing, where steps do not need it."""

    def replay(self, facts: Mapping[str, Any], sums: NDArray[np.int64]) -> None:
        """Update the weights with the sums of a step that other replicas have committed."""
        raise NotImplementedError("only elastic steps have sums that replicas exchange")

    def run(
        self,
        batches: Sequence[Batch],
        lr_share: float,
        signals: StepSignals = StepSignals(),  # noqa: B008 - frozen
        before_update: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Train on this process's micro batches. `before_update` is called before weights change.

        Nothing changes where loss or gradient norm are not finite, where any process's part is void, or where the step
        is abandoned. The result holds the mean loss over the global batch, the gradient norm before clipping, how many
        processes were asked to stop, the first one's seconds, how many parts were void, the number of targets, and with
        experts the health of the routers.
        """
        layout, counted = self._settings.mesh.layout, self._settings.mesh.counts_loss
        parts = [self._own_part(batch) for batch in batches]
        own_targets = float(sum(map(self.objective.count, parts))) if counted else 0.0
        # torch.full, not torch.tensor, which copies from the host and waits for the device.
        total_targets = torch.full((), own_targets, device=self.device)
        dist.all_reduce(total_targets)
        # FSDP averages gradients over the processes that share weights, and losses are sums: this weight makes their
        # total the global mean.
        weight = self._poisoned(layout.replicate * layout.weight_shards * self._scaler.scale / total_targets)
        self._row_targets = [self.objective.count(batch) for batch in batches]
        own_sums = self._forward_backward(parts, weight, signals.abandon)
        if own_sums is None:
            return self._abandoned(signals)
        loss, *sums = own_sums * float(counted)
        values = (float(signals.stop), own_seconds(signals.spent_s), float(signals.void))
        numbers = torch.stack([loss / total_targets, *(torch.full_like(loss, value) for value in values), *sums])
        dist.all_reduce(numbers)
        before_update()
        norm = self._update(lr_share, numbers[0].masked_fill(numbers[VOID - 1] > 0, torch.nan))
        metrics = self.objective.metrics(numbers[VOID:])
        return torch.stack([numbers[0], norm, *numbers[1:VOID], total_targets, *metrics, *self._router_health])

    def _forward_backward(
        self, parts: Sequence[Batch], weight: Tensor, abandon: Callable[[int, int], bool]
    ) -> Tensor | None:
        """Compute the gradients of the weighted loss over all micro batches; returns the objective's unweighted sums.

        None where the step was abandoned on the way.
        """
        if self._pipeline is not None:
            return None if abandon(0, 1) else self._pipeline.train(self._rows(parts), weight)[None]
        total = torch.zeros(1 + self.objective.sum_count, device=self.device)
        for number, part in enumerate(parts):
            if abandon(number, len(parts)):
                return None
            if number == 0:
                self.objective.prepare(parts)
            self._reduce_gradients(last=number == len(parts) - 1)
            self._weigh_routers(weight * self._row_targets[number])
            sums = self._sums(part)
            torch.autograd.backward(sums[0] * weight)
            total += sums.detach()
            if len(parts) > 1:
                self._optimizers.accumulate_gradients()
        return total

    def _abandoned(self, signals: StepSignals) -> Tensor:
        """The numbers of a step that all processes have left: void, and a stop request."""
        self._optimizers.zero_grad()
        for router in self._routers.values():
            router.take_tokens()
        numbers = torch.zeros(TARGETS + 1, device=self.device)
        numbers[STOP], numbers[SPENT_S], numbers[VOID] = 1.0, own_seconds(signals.spent_s), 1.0
        dist.all_reduce(numbers)
        return numbers

    def _poisoned(self, weight: Tensor) -> Tensor:
        return weight * torch.nan if self.poison is not None and self.poison() else weight

    def _update(self, lr_share: float, loss: Tensor) -> Tensor:
        """Update the weights, unless loss or gradient are not finite; returns the gradient norm."""
        norm = self._gradient_norm() / self._scaler.scale
        factor = clip_factor(norm, self._settings.clip) if self._settings.clip else torch.ones_like(norm)
        # Optimizers change nothing where this is NaN.
        factor = factor.masked_fill(~torch.isfinite(norm + loss), torch.nan)
        finite = self._scaler.is_finite(norm)
        if finite:
            self._optimizers.step(lr_share, factor / self._scaler.scale)
        self._balance_experts(torch.isfinite(factor).float())
        self._scaler.update(finite)
        self._optimizers.zero_grad()
        return norm

    def _weigh_routers(self, weight: Tensor) -> None:
        """Weight of the routers' losses in the next micro batch, which are means over it, next to its sum of losses."""
        for router in self._routers.values():
            router.loss_weight = weight / self._settings.mesh.row_parts

    def _balance_experts(self, counts: Tensor) -> None:
        """Once a step: move the routers' biases by the load of all processes, unless `counts` is 0."""
        model = self._model.config
        if not model.expert_layers:
            return
        tokens = self._tokens_of_step()
        for layer, router in self._routers.items():
            router.update_bias(tokens[layer], counts)
        tokens_le = tokens[[layer for layer in range(model.layers) if model.has_experts(layer)]]
        self._router_health = router_health(tokens_le, router_biases(self._model).values())
        if self._pipeline is not None:
            dist.all_reduce(self._router_health, dist.ReduceOp.MAX, self._settings.mesh.pipeline_group)

    def _router_tokens(self) -> Tensor:
        """Tokens that each expert of each layer had on this process since the last call."""
        model = self._model.config
        # Layers of other stages are zero here.
        layers = model.layers if model.expert_layers else 0
        tokens = torch.zeros(layers, model.experts.count, dtype=torch.int64, device=self.device)
        for layer, router in self._routers.items():
            tokens[layer] = router.take_tokens()
        return tokens

    def _tokens_of_step(self) -> Tensor:
        """The same over all processes."""
        tokens = self._router_tokens()
        dist.all_reduce(tokens)
        return tokens

    def _gradient_norm(self) -> Tensor:
        holders: Sequence[HasGradient] = self._optimizers.gradient_holders
        if self._pipeline is None:
            return gradient_norm(holders).to(self.device)
        own = self._pipeline.own_parameters(holders)
        return gradient_norm(own, self._settings.mesh.pipeline_group).to(self.device)

    def _reduce_gradients(self, last: bool) -> None:
        """Reduce-scatter shards at each micro batch (whole gradients would not fit); all-reduce replicas once."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last or self._settings.reduce_each_microbatch)
            self._model.set_requires_all_reduce(last)

    def _own_part(self, batch: Batch) -> Batch:
        mesh = self._settings.mesh
        return own_part(batch, mesh.context_rank, mesh.layout.context)

    def _sums(self, batch: Batch) -> Tensor:
        return self.objective.sums(self._call, batch)

    def _call(self, batch: Batch, *, model: Transformer | None = None, each_loss: bool = False) -> Tensor:
        loss: Tensor = (self._model if model is None else model)(
            self._to_device(batch.inputs),
            self._to_device(batch.targets),
            positions_bt=None if batch.positions is None else self._to_device(batch.positions),
            documents_bt=None if batch.documents is None else self._to_device(batch.documents),
            spans=self._spans(batch),
            loss_chunks=self._settings.loss_chunks,
            each_loss=each_loss,
        )
        return loss

    def _spans(self, batch: Batch) -> VarlenSpans | None:
        """Where documents start and end; a row without any is one document where a sliding window would need a mask."""
        tokens, documents = batch.inputs.shape[1], batch.documents
        whole_rows = documents is None and 0 < self._model.config.sliding_window < tokens
        if whole_rows:
            documents = np.zeros_like(batch.inputs)
        if documents is None or not self._settings.use_varlen:
            return None
        cu_seqlens = cu_seqlens_of(documents)
        if self._settings.may_mask and not fits_varlen_kernel(cu_seqlens):
            return None
        longest = max_seqlen_of(cu_seqlens, tokens)
        return VarlenSpans(self._to_device(cu_seqlens), longest, self._settings.fused_varlen, whole_rows)

    def _rows(self, parts: Sequence[Batch]) -> Rows:
        """Micro batches in one batch for the pipeline, with explicit positions: later stages cannot derive them."""
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
