"""First weights: a pure function of (seed, parameter name), whatever the number of processes.

Each parameter has a generator of its own and is made whole; a process keeps its shard. So one process and a thousand
start from bitwise the same model, and adding a layer changes no other parameter.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from keepstep.config.schema import ModelConfig
from keepstep.models.moe import router_biases
from keepstep.models.quantized_weight import QuantizedWeight, weight_slots
from keepstep.models.transformer import Transformer

_RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")
"""Matrices that write into the residual stream: scaled down so that its variance does not grow with depth."""


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter of a model that is on its device, sharded or not: matrices random, norms 1, biases 0."""
    for bias in router_biases(model).values():
        bias.zero_()
    for name, slot in weight_slots(model):
        keep_shard(slot, _whole_tensor(name, slot, model.config, seed))


def init_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    """Standard deviation of a matrix's first weights.

    `kaiming` is MPT's: √(2 / inputs) for linears and embeddings alike, an embedding's inputs being its width.
    """
    std = math.sqrt(2.0 / shape[-1]) if config.init == "kaiming" else config.init_std
    return std / math.sqrt(2 * config.layers) if name.endswith(_RESIDUAL) else std


def parameter_seed(seed: int, name: str) -> int:
    """The seed of one parameter's generator: 63 bits of a hash, the same on every machine and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _whole_tensor(name: str, parameter: nn.Parameter | QuantizedWeight, config: ModelConfig, seed: int) -> Tensor:
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    if len(parameter.shape) < 2 or name.endswith("_bias"):
        return whole.fill_(1.0 if name.endswith("weight") and config.norm != "rmsnorm_1p" else 0.0)
    generator = torch.Generator(device=parameter.device).manual_seed(parameter_seed(seed, name))
    return whole.normal_(0.0, init_std(name, parameter.shape, config), generator=generator)


def keep_shard(parameter: Tensor | QuantizedWeight, whole: Tensor) -> None:
    """Copy this process's part of a whole tensor, which every process has, into a parameter; or quantise it."""
    if isinstance(parameter, QuantizedWeight):
        parameter.store(whole)
        return
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    # src_data_rank=None: every process has the whole tensor already, so nothing is sent.
    shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(shard.to_local())
