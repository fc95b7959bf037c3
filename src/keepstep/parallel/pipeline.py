"""Pipeline parallelism: which process holds which blocks, and how micro batches flow through them.

Stage i lives on process i modulo the pipeline's degree, under the schedules of torch.distributed.pipelining. A tied
embedding is held twice, by the first and by the last stage, under one name: both copies start equal, get the sum of
both gradients and so stay equal bit for bit; a checkpoint holds one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import sum_reducer
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor

from keepstep.config.layout import stage_layers
from keepstep.config.schema import ParallelConfig
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.models.moe import routers
from keepstep.models.transformer import Transformer
from keepstep.parallel.mesh import ParallelMesh

Held = TypeVar("Held")

_BESIDE_BLOCKS = ("embed", "position", "norm", "head")


def split_stages(model: Transformer, rank: int, processes: int, stages_per_process: int) -> list[Transformer]:
    """Keep this process's part of a model on the meta device, in place; returns its stages, which share its modules."""
    if processes == 1:
        return [model]
    count = processes * stages_per_process
    stages = []
    for index in range(rank, count, processes):
        stage = model if stages_per_process == 1 else _same_modules(model)
        _keep_stage(stage, index, count)
        stages.append(stage)
    if stages_per_process > 1:
        _join_names(model, stages)
    return stages


def _same_modules(model: Transformer) -> Transformer:
    """Another holder of a model's own modules: with their adapters, and frozen where they are."""
    with torch.device("meta"):
        holder = Transformer(model.config)
    holder.blocks = nn.ModuleDict(dict(model.blocks.items()))
    for name in _BESIDE_BLOCKS:
        setattr(holder, name, getattr(model, name))
    return holder


def _keep_stage(model: Transformer, index: int, count: int) -> None:
    is_first, is_last = index == 0, index == count - 1
    layers = stage_layers(model.config.layers, count)[index]
    for name in [name for name in model.blocks if int(name) not in layers]:
        del model.blocks[name]
    if not is_first:
        model.position = None
    if not is_first and not (is_last and model.config.tied):
        model._modules["embed"] = None
    if not is_last:
        model.norm = model.head = None


def _join_names(model: Transformer, stages: list[Transformer]) -> None:
    """Make `model` the holder of all stages' modules: each parameter keeps the name it has in the whole model."""
    model.blocks = nn.ModuleDict({name: block for stage in stages for name, block in stage.blocks.items()})
    for name in _BESIDE_BLOCKS:
        held = [stage._modules.get(name) for stage in stages]
        setattr(model, name, next((module for module in held if module is not None), None))


@dataclass(frozen=True)
class Rows:
    """Micro batches on the device, one after the other along dim 0."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None

    def stage_inputs(self) -> dict[str, Tensor]:
        """What every stage needs in addition to the activations."""
        given = {"targets_bt": self.targets, "positions_bt": self.positions, "documents_bt": self.documents}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


@dataclass(frozen=True)
class PipelineShape:
    """Sizes of one micro batch on one process."""

    microbatches: int
    rows: int
    tokens: int
    """Of a row on this context rank."""
    dtype: torch.dtype
    loss_chunks: int


def gathered_once(actions: Sequence[Any]) -> list[Any]:
    """What a process does in a step, with every stage's weights gathered once and let go of once.

    Torch gathers the stages that come next, three at the most, and lets go of the others: with four on a process that
    is nearly once a micro batch.
    """

    def without_repeats(kind: Any, actions: Sequence[Any]) -> list[Any]:
        seen: set[int] = set()
        kept = []
        for action in actions:
            if action.computation_type is kind:
                if action.stage_index in seen:
                    continue
                seen.add(action.stage_index)
            kept.append(action)
        return kept

    return without_repeats(RESHARD, without_repeats(UNSHARD, actions)[::-1])[::-1]


class Pipeline:
    """This process's stages and the schedule that runs them."""

    def __init__(
        self, stages: list[Transformer], mesh: ParallelMesh, config: ParallelConfig, shape: PipelineShape
    ) -> None:
        group = mesh.pipeline_group
        assert group is not None
        self._stages, self._group, self._shape = stages, group, shape
        self._rank, self._processes = group.rank(), group.size()
        on_gpu = mesh.device_mesh.device_type == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._stream_tokens = shape.tokens // mesh.layout.tensor
        self._sending: list[Any] = []
        self._weight = torch.ones(())
        self._loss_sum = torch.zeros((), device=self._device)
        self._context_group, self._row_parts = mesh.context_group, mesh.row_parts
        for stage in stages:
            # Not a keyword of the schedule's step: it would try to cut it into micro batches.
            forward = partial(stage.forward, loss_chunks=shape.loss_chunks)
            has_losses = stage.config.experts.aux_loss or stage.config.experts.z_loss
            weighs = has_losses and next(routers(stage), None) is not None
            stage.forward = partial(self._weigh_routers, stage, forward) if weighs else forward  # type: ignore[method-assign]
        self._schedule = self._build_schedule(config)

    @property
    def has_loss(self) -> bool:
        """Whether losses are computed on this process."""
        return self._rank == self._processes - 1

    def train(self, rows: Rows, weight: Tensor) -> Tensor:
        """Forward and backward of a step's micro batches; gradients are of the summed loss times `weight`.

        Returns the sum of token losses, on the last process; zero elsewhere.
        """
        self._weight = weight
        self._loss_sum = torch.zeros((), device=self._device)
        first = (rows.tokens,) if self._rank == 0 else ()
        target = rows.targets if self.has_loss else None
        self._schedule.step(*first, target=target, **rows.stage_inputs())
        self._sum_tied_gradients()
        return self._loss_sum

    def evaluate(self, rows: Rows) -> Tensor:
        """The sum of token losses, on the last process; zero elsewhere. A stage does not wait for later ones."""
        loss_sum = torch.zeros((), device=self._device)
        for number, stage in enumerate(self._stages):
            is_first = number == 0 and self._rank == 0
            stream = rows.tokens if is_first else self._receive(rows.tokens.shape[0])
            stream = stage(stream, **rows.stage_inputs())
            if self.has_loss and number == len(self._stages) - 1:
                loss_sum = stream
            else:
                self._send(stream)
        return loss_sum

    def own_parameters(self, parameters: Sequence[Held]) -> list[Held]:
        """Those that no other stage holds a copy of, or of which ours is the one that counts."""
        tied = self._tied_weight()
        return [each for each in parameters if each is not tied or self._rank == 0]

    def _build_schedule(self, config: ParallelConfig) -> Any:
        count = self._processes * len(self._stages)
        stages: list[Any] = [
            self._torch_stage(stage, self._rank + number * self._processes, count)
            for number, stage in enumerate(self._stages)
        ]
        # Losses are sums weighed by the caller, and the one output of the last stage: a number, so add, do not join.
        options: dict[str, Any] = {"loss_fn": self._weigh, "scale_grads": False, "output_merge_spec": sum_reducer}
        match config.schedule:
            case "1f1b":
                return Schedule1F1B(stages[0], self._shape.microbatches, **options)
            case "interleaved":
                schedule: Any = ScheduleInterleaved1F1B(stages, self._shape.microbatches, **options)
            case "zero_bubble":
                schedule = ScheduleInterleavedZeroBubble(stages, self._shape.microbatches, **options)
        for rank, actions in schedule.pipeline_order_with_comms.items():
            schedule.pipeline_order_with_comms[rank] = gathered_once(actions)
        return schedule

    def _torch_stage(self, stage: Transformer, index: int, count: int) -> PipelineStage:
        # Shapes are given, so that torch does not find them by running the model.
        stream = torch.empty(self._stream_shape(self._shape.rows), dtype=self._shape.dtype, device="meta")
        tokens = torch.empty(self._shape.rows, self._shape.tokens, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta")
        return PipelineStage(
            stage,
            index,
            count,
            self._device,
            input_args=(tokens if index == 0 else stream.requires_grad_(),),
            output_args=(loss.requires_grad_() if index == count - 1 else stream.clone().requires_grad_(),),
            group=self._group,
        )

    def _weigh(self, loss_sum: Tensor, _targets: Tensor) -> Tensor:
        self._loss_sum = self._loss_sum + loss_sum.detach()
        return loss_sum * self._weight

    def _weigh_routers(self, stage: Transformer, forward: Any, *args: Any, targets_bt: Tensor, **kwargs: Any) -> Tensor:
        """Call a stage; the losses of its routers are means over the micro batch, next to the sum of its losses."""
        targets = (targets_bt != IGNORE_INDEX).sum()
        if self._context_group is not None:
            dist.all_reduce(targets, group=self._context_group)
        for _, router in routers(stage):
            router.loss_weight = self._weight * targets / self._row_parts
        output: Tensor = forward(*args, targets_bt=targets_bt, **kwargs)
        return output

    def _stream_shape(self, rows: int) -> tuple[int, int, int]:
        return rows, self._stream_tokens, self._stages[0].config.hidden

    def _receive(self, rows: int) -> Tensor:
        stream = torch.empty(self._stream_shape(rows), dtype=self._shape.dtype, device=self._device)
        dist.recv(stream, self._peer(self._rank - 1), group=self._group)
        return stream

    def _send(self, stream: Tensor) -> None:
        for work in self._sending:
            work.wait()
        stream = stream.contiguous()
        # The tensor is kept with the work: it must live until it has left.
        self._kept = stream
        self._sending = [dist.isend(stream, self._peer(self._rank + 1), group=self._group)]

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank % self._processes)

    def _tied_weight(self) -> nn.Parameter | None:
        if not self._stages[0].config.tied or self._rank not in (0, self._processes - 1):
            return None
        holder = self._stages[0 if self._rank == 0 else -1]
        return holder.embed._parameters["weight"]

    def _sum_tied_gradients(self) -> None:
        weight = self._tied_weight()
        if weight is None or weight.grad is None:
            return
        ours = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        if not ours.numel():
            return
        theirs = torch.empty_like(ours)
        peer = self._peer(self._processes - 1 if self._rank == 0 else 0)
        operations = [
            dist.P2POp(dist.isend, ours, peer, self._group),
            dist.P2POp(dist.irecv, theirs, peer, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        ours += theirs
