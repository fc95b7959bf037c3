"""Low-rank adapters on the blocks' linears, in the fused layouts that the blocks compute with.

Shape legend: o output rows of a linear (fused ones hold several projections), i inputs, p projections with an adapter,
r rank.

`lora_a` [p·r, i] holds the projections' first factors one after the other. `lora_b` [o, r] has the rows of the
linear's own weight, and each row belongs to one projection: sharding and tensor slices cut it as they cut the weight,
and Hugging Face's separate q, k, v, gate and up come out of it by the same rules as the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import LoraConfig, ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.init import keep_shard, parameter_seed
from keepstep.models.mlp import gate_blocks
from keepstep.models.ops.backend import backend
from keepstep.models.ops.matmul import lora_matmul, matmul_add
from keepstep.models.quantized_weight import QuantizedLinear, QuantizedWeight, quantize_linears
from keepstep.models.transformer import Transformer

ADAPTER_NAMES = ("lora_a", "lora_b")
_FUSED = {
    "attention.qkv": ("q", "k", "v"),
    "attention.query_up": ("q",),
    "attention.out": ("o",),
    "mlp.gate_up": ("gate", "up"),
    "mlp.up": ("up",),
    "mlp.down": ("down",),
}
"""Our linears and the projections that each of them holds, in the order of the separate names."""


@dataclass(frozen=True)
class AdapterShape:
    """What a linear's adapters are: rank, scale and which projection each output row belongs to."""

    rank: int
    scale: float
    dropout: float
    slots: tuple[int, ...]
    """Output rows repeat in groups of slots; for each slot the number of its projection, -1 where it has no adapter."""
    width: int
    """Rows in a slot."""

    @property
    def projections(self) -> int:
        """Projections with an adapter."""
        return max(self.slots) + 1


class LoraLinear(nn.Linear):
    """A frozen linear and its trained adapters; `weight` and `bias` keep their names, so that weights load as ever."""

    def __init__(self, base: nn.Linear, shape: AdapterShape) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base.base if isinstance(base, QuantizedLinear) else None
        self.bias = base.bias
        if self.base is None:
            self.weight = base.weight
        else:
            self.register_parameter("weight", None)
        self.shape = shape
        self.enabled = True
        device = self.base.device if self.base else base.weight.device
        self.lora_a = nn.Parameter(torch.empty(shape.projections * shape.rank, base.in_features, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, shape.rank, device=device))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """The linear's output and the adapters' on top."""
        if self.base is not None:
            return self._on_quantized(self.base, input)
        if not self.enabled:
            return F.linear(input, self.weight, self.bias)
        dropout = self.shape.dropout if self.training else 0.0
        fuses = backend().fuses_matmuls(input)
        if fuses and not dropout:
            return lora_matmul(input, self.weight, self.lora_a, self._spread() * self.shape.scale, self.bias)
        inner = F.linear(F.dropout(input, dropout) if dropout else input, self.lora_a)
        if fuses:
            # The large matmul adds the adapters' output in its epilogue: no pass over the sum, and one rounding.
            return matmul_add(input, self.weight, F.linear(inner, self._spread() * self.shape.scale, self.bias))
        output = F.linear(input, self.weight, self.bias)
        # addmm adds to the output in the matmul itself, so the adapters cost no second pass over it.
        flat = torch.addmm(output.flatten(0, -2), inner.flatten(0, -2), self._spread().t(), alpha=self.shape.scale)
        return flat.view(output.shape)

    def _on_quantized(self, base: QuantizedWeight, input: Tensor) -> Tensor:  # noqa: A002
        if not self.enabled:
            return base.matmul(input, self.bias)
        lora_b = self._spread() * self.shape.scale
        if not (self.shape.dropout and self.training):
            return base.matmul(input, self.bias, self.lora_a, lora_b)
        inner = F.linear(F.dropout(input, self.shape.dropout), self.lora_a)
        return base.matmul(input, self.bias) + F.linear(inner, lora_b)

    def merged_weight(self) -> Tensor:
        """The weight of a plain linear that computes the same (without dropout), in the weight's own precision."""
        whole = self.base.dequantized(torch.float32) if self.base else self.weight
        exact = whole.double() + self.shape.scale * (self._spread().double() @ self.lora_a.double())
        return exact.to(whole.dtype)

    def grouped(self) -> Tensor:
        """`lora_b` as [groups, slots, width, r]; a slice of whole groups works too."""
        return self.lora_b.view(-1, len(self.shape.slots), self.shape.width, self.shape.rank)

    def _spread(self) -> Tensor:
        """`lora_b` as a matrix [o, p·r] that is zero outside each row's own projection."""
        if self.shape.slots == (0,):
            return self.lora_b
        grouped = self.grouped()
        spread = grouped.new_zeros(*grouped.shape[:3], self.shape.projections, self.shape.rank)
        for projection, slots in projection_slots(self.shape).items():
            spread[:, slots, :, projection] = grouped[:, slots]
        return spread.flatten(0, 2).flatten(1)


def projection_slots(shape: AdapterShape) -> dict[int, slice]:
    """Where each projection's rows stand in a group; they are neighbours in every layout we have."""
    found = {}
    for projection in range(shape.projections):
        first = shape.slots.index(projection)
        found[projection] = slice(first, first + shape.slots.count(projection))
    return found


def apply_lora(model: Transformer, config: LoraConfig) -> None:
    """Freeze the model and put adapters on the projections that `config.targets` names, in place."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets = config.targets_in(model.config)
    for block in model.blocks.values():
        linears = dict(block.named_modules())
        for place, names in _FUSED.items():
            linear = linears.get(place)
            if linear is None or not set(names) & set(targets):
                continue
            if type(linear) not in (nn.Linear, QuantizedLinear):
                raise ConfigError(f"{place} is a {type(linear).__name__}, which takes no adapter", "model.linear=dense")
            slots, width = _slots(place, model.config, targets)
            shape = AdapterShape(config.rank, config.alpha / config.rank, config.dropout, slots, width)
            assert isinstance(linear, nn.Linear)
            block.set_submodule(place, LoraLinear(linear, shape))


def prepare_adapters(model: Transformer, config: LoraConfig, dtype: torch.dtype) -> None:
    """Add adapters to a model on the meta device and keep its frozen weights in `dtype`: they need no fp32 masters.

    The linears of its blocks are quantised where `config.base` says so.
    """
    if config.base != "bf16":
        quantize_linears(model.blocks, config.base)
    apply_lora(model, config)
    freeze_weights(model, dtype)


def freeze_weights(model: Transformer, dtype: torch.dtype) -> None:
    """Keep the weights of a model on the meta device that are not trained in `dtype`."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                frozen = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                setattr(module, name, frozen)


def _slots(place: str, config: ModelConfig, targets: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
    """The slots of the linear at `place` and their width, as its layout has them."""
    wanted = [name for name in _FUSED[place] if name in targets]
    numbers = [wanted.index(name) if name in wanted else -1 for name in _FUSED[place]]
    match place:
        case "attention.qkv":
            query, key, value = numbers
            return (*[query] * (config.heads // config.key_value_heads), key, value), config.head_size
        case "mlp.gate_up":
            return tuple(numbers), config.ffn_size // gate_blocks(config)
        case _:
            rows = {"attention.query_up": config.heads * config.head_size, "mlp.up": config.ffn_size}
            return (0,), rows.get(place, config.hidden)


@torch.no_grad()
def init_adapters(model: Transformer, seed: int) -> None:
    """First adapters: the first factor uniform in ±1/√inputs, the second zero, so that nothing changes at first."""
    for name, parameter in adapter_parameters(model):
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if name.endswith("lora_a"):
            generator = torch.Generator(device=parameter.device).manual_seed(parameter_seed(seed, name))
            bound = 1.0 / math.sqrt(parameter.shape[1])
            whole.uniform_(-bound, bound, generator=generator)
        keep_shard(parameter, whole)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapters by name, in the model's order."""
    return ((name, item) for name, item in model.named_parameters() if name.endswith(ADAPTER_NAMES))


@torch.no_grad()
def merge_lora(model: Transformer) -> None:
    """Turn adapters into plain weights, in place. The model must be whole (not sharded)."""
    for name, linear in list(lora_modules(model)):
        plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        plain.weight = nn.Parameter(linear.merged_weight())
        if linear.bias is not None:
            plain.bias = nn.Parameter(linear.bias)
        model.set_submodule(name, plain)


@contextmanager
def adapters_off(model: Transformer) -> Iterator[None]:
    """Inside, the model computes as it did before its adapters were trained."""
    adapted = [linear for _, linear in lora_modules(model)]
    for linear in adapted:
        linear.enabled = False
    try:
        yield
    finally:
        for linear in adapted:
            linear.enabled = True


def lora_modules(model: Transformer) -> Iterator[tuple[str, LoraLinear]]:
    """Every linear with adapters, by its name."""
    return ((name, item) for name, item in model.named_modules() if isinstance(item, LoraLinear))


def projection_factors(name: str, linear: LoraLinear, targets: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors A [r, i] and B [rows, r] of each adapted projection, by its short name (q, gate, …)."""
    wanted = [projection for projection in _FUSED[name.split(".", 2)[2]] if projection in targets]
    factors_a = linear.lora_a.split(linear.shape.rank)
    return {
        wanted[number]: (factors_a[number], linear.grouped()[:, slots].flatten(0, 2))
        for number, slots in projection_slots(linear.shape).items()
    }
