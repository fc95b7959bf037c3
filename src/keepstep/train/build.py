"""The part of a run that learns: model, weights, optimizer and step, built alike for training and for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from keepstep.config.layout import accumulation_steps
from keepstep.config.schema import LoraConfig, RunConfig
from keepstep.data.loader import Loaders
from keepstep.interop.initial_weights import WeightsId, load_initial_weights
from keepstep.models.block_plan import RecomputeMode
from keepstep.models.lora import freeze_weights, prepare_adapters
from keepstep.models.ops.fused_attention import has_kernel
from keepstep.models.transformer import Transformer, add_embedding_noise, use_fp8_head
from keepstep.parallel.apply import apply_parallel
from keepstep.parallel.mesh import ParallelMesh
from keepstep.parallel.pipeline import Pipeline, PipelineShape
from keepstep.train.device import compute_dtype, recompute_modes, uses_varlen_attention
from keepstep.train.elastic_step import ElasticStep
from keepstep.train.objectives.make import make_objective
from keepstep.train.optim.loss_scaler import LossScaler
from keepstep.train.optim.master_weights import MasterWeights
from keepstep.train.optim.optimizer import Optimizers
from keepstep.train.step import StepSettings, TrainStep

SpreadModel = tuple[Transformer, list[Transformer], bool]
"""A process's part of the model, without memory yet; what is to be called, itself or its pipeline stages; whether it is
sharded."""


@dataclass(frozen=True)
class Learner:
    """What a step works on."""

    model: Transformer
    optimizers: Optimizers
    scaler: LossScaler
    step: TrainStep
    origin: WeightsId | None = None
    """What the model was filled with, where that was not made by a seed."""
    frozen: Transformer | None = None
    """The model that holds weights as they were before training, if the run needs them."""


def build_learner(
    config: RunConfig, mesh: ParallelMesh, device: torch.device, *, fill: bool = True, loaders: Loaders | None = None
) -> Learner:
    """This process's part of the model with its first weights, its optimizer and its step.

    Without `fill` trained weights are left as memory has them, for a state that is about to be loaded. `loaders` are
    the run's data, from which reinforcement learning has its prompts.
    """
    return fill_learner(config, mesh, device, spread_model(config, mesh, device), fill=fill, loaders=loaders)


def spread_model(
    config: RunConfig,
    mesh: ParallelMesh,
    device: torch.device,
    modes: Sequence[RecomputeMode] = (),
    *,
    frozen: bool = False,
) -> SpreadModel:
    """Build on the meta device and split over processes; `modes` says what each block recomputes, if not `config`.

    A `frozen` model is never trained, so it has its weights in the precision that it computes in.
    """
    dtype = compute_dtype(config.precision, device)
    # One process has nothing to shard: with weights already in half precision it does without FSDP's copies.
    one_process = mesh.layout.world_size == 1 and config.parallel.shard == -1
    alone = one_process and dtype == torch.bfloat16 and not config.parallel.offload
    sharded = not alone and not config.whole_weights
    adapted = config.lora.rank and not frozen
    fp8 = config.precision == "fp8" and not adapted
    with torch.device("meta"):
        model = Transformer(replace(config.model, linear="fp8") if fp8 else config.model)
    if fp8:
        use_fp8_head(model)
    if frozen:
        freeze_weights(model.requires_grad_(False), dtype)
    elif adapted:
        prepare_adapters(model, config.adapters, dtype)
    modes = modes or recompute_modes(config, mesh.layout, device)
    fused_attention = config.compute.attention == "auto" and has_kernel(device, config.model.head_size)
    shard_dtype = dtype if sharded else None
    stages = apply_parallel(model, mesh, config.parallel, config.compute, shard_dtype, modes, fused_attention)
    return model, stages, sharded


def fill_learner(
    config: RunConfig,
    mesh: ParallelMesh,
    device: torch.device,
    spread: SpreadModel,
    *,
    fill: bool = True,
    loaders: Loaders | None = None,
) -> Learner:
    """Give the model memory and first weights, and put together what trains it."""
    model, stages, sharded = spread
    dtype = compute_dtype(config.precision, device)
    for stage in stages:
        stage.to_empty(device="cpu" if config.parallel.offload else device)
    # Adapters train on top of frozen weights that no checkpoint holds.
    origin = load_initial_weights(model, config) if fill or config.lora.rank else None
    if config.finetune.neftune:
        add_embedding_noise(model, config.finetune.neftune, mesh.layout.context * mesh.layout.tensor)
    masters = MasterWeights(model) if not sharded and dtype == torch.bfloat16 else None
    optimizers = Optimizers(model, config.optimizer, masters)
    scaler = LossScaler(enabled=dtype == torch.float16)
    reference = None
    if config.has_reference and not config.lora.rank:
        reference, origin = build_reference(config, mesh, device, origin)
    use_varlen = uses_varlen_attention(config, mesh.layout, device, dtype)
    own_kernels = use_varlen and config.compute.attention == "auto" and mesh.layout.tensor == 1
    settings = StepSettings(
        mesh=mesh,
        device=device,
        clip=config.optimizer.clip,
        loss_chunks=config.compute.loss_chunks,
        reduce_each_microbatch=not config.parallel.keep_gathered,
        use_varlen=use_varlen,
        may_mask=config.compute.attention != "flash",
        fused_varlen=own_kernels and has_kernel(device, config.model.head_size, masked=True),
        objective=make_objective(config, model, reference, loaders),
    )
    frozen = model if config.lora.rank else reference
    if config.integer_sums:
        microbatches = config.global_batch // config.microbatch
        exact = ElasticStep(model, optimizers, scaler, settings, seed=config.seed, microbatches=microbatches)
        return Learner(model, optimizers, scaler, exact, origin, frozen)
    pipeline = _build_pipeline(config, mesh, stages, dtype) if mesh.layout.pipeline > 1 else None
    return Learner(model, optimizers, scaler, TrainStep(model, optimizers, scaler, settings, pipeline), origin, frozen)


def build_reference(
    config: RunConfig, mesh: ParallelMesh, device: torch.device, expected: WeightsId | None
) -> tuple[Transformer, WeightsId | None]:
    """A frozen copy of the weights that the run starts from, split like the model, and which weights they are."""
    config = replace(
        config,
        lora=LoraConfig(),
        parallel=replace(config.parallel, keep_gathered=False),
        compute=replace(config.compute, recompute="none"),
    )
    reference, stages, _ = spread_model(config, mesh, device, frozen=True)
    for stage in stages:
        stage.to_empty(device="cpu" if config.parallel.offload else device)
    origin = load_initial_weights(reference, config, expected)
    return reference.eval(), origin


def _build_pipeline(config: RunConfig, mesh: ParallelMesh, stages: list[Transformer], dtype: torch.dtype) -> Pipeline:
    shape = PipelineShape(
        microbatches=accumulation_steps(config.global_batch, config.microbatch, mesh.layout.data_ranks),
        rows=config.microbatch,
        tokens=config.model.seq_len // mesh.layout.context,
        dtype=dtype,
        loss_chunks=config.compute.loss_chunks,
    )
    return Pipeline(stages, mesh, config.parallel, shape)
