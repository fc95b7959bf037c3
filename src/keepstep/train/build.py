"""The part of a run that learns: model, weights, optimizer and step, built alike for training and for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from keepstep.config.layout import Layout
from keepstep.config.schema import RunConfig
from keepstep.core.errors import HardwareError
from keepstep.models.neftune import add_embedding_noise
from keepstep.models.size import peak_flops
from keepstep.models.transformer import Transformer
from keepstep.parallel.apply import apply_parallel
from keepstep.parallel.recompute import MemoryFacts, Mode, choose_modes
from keepstep.train.master import MasterWeights
from keepstep.train.optimizer import Optimizers
from keepstep.train.record import measured_peak_flops
from keepstep.train.scaler import LossScaler
from keepstep.train.start import fill_weights, prepare_adapters
from keepstep.train.step import StepSettings, TrainStep


@dataclass(frozen=True)
class Learner:
    """What a step works on."""

    model: Transformer
    optimizers: Optimizers
    scaler: LossScaler
    step: TrainStep


def build_learner(config: RunConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> Learner:
    """This process's part of the model with its first weights, its optimizer and its step."""
    dtype = compute_dtype(config.precision, device)
    # One process has nothing to share: with weights already in half precision it is spared FSDP's copies.
    sharded = layout.world_size > 1 or dtype != torch.bfloat16
    linear = "fp8" if config.precision == "fp8" else config.model.linear
    with torch.device("meta"):
        model = Transformer(replace(config.model, linear=linear))
    if config.lora.rank:
        prepare_adapters(model, config.lora, dtype)
    modes = recompute_modes(config, layout, device)
    apply_parallel(model, mesh, config.parallel, config.compute, dtype if sharded else None, modes)
    model.to_empty(device=device)
    fill_weights(model, config)
    if config.finetune.neftune:
        add_embedding_noise(model, config.finetune.neftune)
    optimizers = Optimizers(model, config.optimizer, None if sharded else MasterWeights(model))
    scaler = LossScaler(enabled=dtype == torch.float16)
    settings = StepSettings(
        layout=layout,
        device=device,
        clip=config.optimizer.clip,
        loss_chunks=config.compute.loss_chunks,
        reduce_each_microbatch=not config.parallel.keep_gathered,
    )
    return Learner(model, optimizers, scaler, TrainStep(model, optimizers, scaler, settings))


def recompute_modes(config: RunConfig, layout: Layout, device: torch.device) -> list[Mode]:
    """What each block recomputes; `auto` looks at the memory of the device."""
    if config.compute.recompute != "auto":
        return [config.compute.recompute] * config.model.layers
    if device.type != "cuda":
        return ["none"] * config.model.layers
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return choose_modes(config.model, MemoryFacts(config.microbatch, layout.shard * layout.tensor, total_bytes))


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
