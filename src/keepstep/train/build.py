"""The part of a run that learns: model, weights, optimizer and step, built alike for training and for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from keepstep.config.check import accumulation_steps
from keepstep.config.layout import Layout
from keepstep.config.schema import RunConfig
from keepstep.core.errors import HardwareError
from keepstep.models.causal import has_kernel
from keepstep.models.neftune import add_embedding_noise
from keepstep.models.size import peak_flops
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.apply import apply_parallel
from keepstep.parallel.mesh import Grid
from keepstep.parallel.pipeline import Pipeline, PipelineShape
from keepstep.parallel.recompute import MemoryFacts, Mode, choose_modes
from keepstep.train.exact import ExactStep
from keepstep.train.kernels import attends_by_bounds
from keepstep.train.master import MasterWeights
from keepstep.train.optimizer import Optimizers
from keepstep.train.record import measured_peak_flops
from keepstep.train.scaler import LossScaler
from keepstep.train.start import Origin, fill_weights, prepare_adapters
from keepstep.train.step import StepSettings, TrainStep


@dataclass(frozen=True)
class Learner:
    """What a step works on."""

    model: Transformer
    optimizers: Optimizers
    scaler: LossScaler
    step: TrainStep
    origin: Origin | None = None
    """What the model was filled with, where that was not made by a seed."""


def build_learner(config: RunConfig, grid: Grid, device: torch.device, *, fill: bool = True) -> Learner:
    """This process's part of the model with its first weights, its optimizer and its step.

    Without `fill` trained weights are left as memory has them, for a state that is about to be loaded.
    """
    return fill_learner(config, grid, device, spread_model(config, grid, device), fill=fill)


@dataclass(frozen=True)
class SpreadModel:
    """This process's part of the model, without memory yet, and what is to be called: itself or its pipeline stages."""

    model: Transformer
    stages: list[Transformer]
    sharded: bool


def spread_model(config: RunConfig, grid: Grid, device: torch.device) -> SpreadModel:
    """Build on the meta device and split over processes."""
    dtype = compute_dtype(config.precision, device)
    # One process has nothing to share: with weights already in half precision it is spared FSDP's copies.
    alone = grid.layout.world_size == 1 and dtype == torch.bfloat16 and not config.parallel.offload
    sharded = not alone and config.reproducible != "elastic"
    linear = "fp8" if config.precision == "fp8" else config.model.linear
    with torch.device("meta"):
        model = Transformer(replace(config.model, linear=linear))
    if config.lora.rank:
        prepare_adapters(model, config.lora, dtype)
    modes = recompute_modes(config, grid.layout, device)
    stages = apply_parallel(model, grid, config.parallel, config.compute, dtype if sharded else None, modes)
    if config.compute.attention == "auto" and has_kernel(device):
        for block in (block for stage in stages for block in stage.blocks.values()):
            assert isinstance(block, Block)
            block.attention.at_once = block.attention.may_attend_at_once()
    return SpreadModel(model, stages, sharded)


def fill_learner(
    config: RunConfig, grid: Grid, device: torch.device, spread: SpreadModel, *, fill: bool = True
) -> Learner:
    """Give the model memory and first weights, and put together what trains it."""
    model, stages, sharded = spread.model, spread.stages, spread.sharded
    dtype = compute_dtype(config.precision, device)
    for stage in stages:
        stage.to_empty(device="cpu" if config.parallel.offload else device)
    # Adapters train on top of frozen weights that no checkpoint holds.
    origin = fill_weights(model, config) if fill or config.lora.rank else None
    if config.finetune.neftune:
        add_embedding_noise(model, config.finetune.neftune, grid.layout.context * grid.layout.tensor)
    masters = MasterWeights(model) if not sharded and dtype == torch.bfloat16 else None
    optimizers = Optimizers(model, config.optimizer, masters)
    scaler = LossScaler(enabled=dtype == torch.float16)
    settings = StepSettings(
        grid=grid,
        device=device,
        clip=config.optimizer.clip,
        loss_chunks=config.compute.loss_chunks,
        reduce_each_microbatch=not config.parallel.keep_gathered,
        by_bounds=attends_by_bounds(config, grid.layout, device, dtype),
        may_mask=config.compute.attention != "flash",
    )
    if config.reproducible == "elastic":
        microbatches = config.global_batch // config.microbatch
        exact = ExactStep(model, optimizers, scaler, settings, seed=config.seed, microbatches=microbatches)
        return Learner(model, optimizers, scaler, exact, origin)
    pipeline = _build_pipeline(config, grid, stages, dtype) if grid.layout.pipeline > 1 else None
    return Learner(model, optimizers, scaler, TrainStep(model, optimizers, scaler, settings, pipeline), origin)


def _build_pipeline(config: RunConfig, grid: Grid, stages: list[Transformer], dtype: torch.dtype) -> Pipeline:
    shape = PipelineShape(
        microbatches=accumulation_steps(config.global_batch, config.microbatch, grid.layout.data_ranks),
        rows=config.microbatch,
        tokens=config.model.seq_len // grid.layout.context,
        dtype=dtype,
        loss_chunks=config.compute.loss_chunks,
    )
    return Pipeline(stages, grid, config.parallel, shape)


def recompute_modes(config: RunConfig, layout: Layout, device: torch.device) -> list[Mode]:
    """What each block recomputes; `auto` looks at the memory of the device."""
    if config.compute.recompute != "auto":
        return [config.compute.recompute] * config.model.layers
    if device.type != "cuda":
        return ["none"] * config.model.layers
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    state_ranks = layout.weight_shards * layout.tensor * layout.pipeline
    modes = choose_modes(config.model, MemoryFacts(config.microbatch, state_ranks, total_bytes))
    if layout.pipeline > 1 and config.parallel.schedule == "zero_bubble":
        # What selective recomputation keeps serves one backward pass, and this schedule makes two.
        return ["full" if mode == "selective" else mode for mode in modes]
    return modes


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The number format of matrix products."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise HardwareError(
            f"precision is bf16, but {torch.cuda.get_device_name(device)} has none", "precision=fp16 or precision=fp32"
        )
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    return dtypes[precision]


def device_name(device: torch.device) -> str:
    """What the machine calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The published rate where there is one, else a measured one."""
    known = peak_flops(device_name(device), "bf16") if dtype != torch.float32 else None
    return known or measured_peak_flops(device)
