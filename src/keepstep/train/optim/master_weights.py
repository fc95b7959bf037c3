"""fp32 master weights stored as two halves: the bf16 weight of the model, and the 16 bits that it lacks.

Under FSDP the shards themselves are fp32. A single process needs no shards: its model holds bf16 weights (no cast in
any forward pass, gradients of half the size), and the lower halves are stored here. Together they are the exact fp32
number, and nothing is stored twice: 2 bytes per parameter less than a separate fp32 copy, 16 GB for 8 billion.

The bf16 half is rounded to nearest. The lower half is the difference in bits and may be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.models.ops.backend import backend


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as bf16 and the 16 bits below it."""
    bits = whole.contiguous().view(torch.int32)
    # Ties round up: the difference then always fits 16 bits, which rounding to even does not guarantee.
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 tensor that `split` took apart."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


@dataclass
class GradientHolder:
    """Holds a gradient like a parameter does."""

    grad: Tensor | None


class MasterWeights:
    """The lower halves of a model's weights, and fp32 sums of gradients where there are several micro batches."""

    def __init__(self, model: nn.Module) -> None:
        self._low: dict[nn.Parameter, Tensor] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
                continue
            high, low = split(parameter.data)
            parameter.data = high
            self._low[parameter] = low

    def low(self, parameter: nn.Parameter) -> Tensor:
        """The lower half of one weight."""
        return self._low[parameter]

    def read(self, parameter: nn.Parameter) -> Tensor:
        """A weight in fp32."""
        return join(parameter.data, self._low[parameter])

    def write(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Set a weight to a new fp32 value."""
        high, low = split(whole)
        parameter.data.copy_(high)
        self._low[parameter].copy_(low)

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Move gradients into fp32 sums: bf16 is too coarse to add micro batches in."""
        for parameter in self._low:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter].add_(parameter.grad)
            else:
                self._sums[parameter] = parameter.grad.float()
            parameter.grad = None

    def take_gradients(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Use these sums, added up elsewhere."""
        self._sums = dict(gradients)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of the whole step so far."""
        return self._sums.get(parameter, parameter.grad)

    def holders(self) -> list[GradientHolder]:
        """All gradients, for norms."""
        return [GradientHolder(self.gradient(parameter)) for parameter in self._low]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._sums.clear()
        for parameter in self._low:
            parameter.grad = None


class SplitAdamW(torch.optim.Optimizer):
    """Decoupled AdamW on split weights: one pass over weight, gradient and moments."""

    def __init__(self, groups: list[dict[str, Any]], masters: MasterWeights, **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._masters = masters

    @torch.no_grad()
    def update(self, factor: Tensor) -> None:
        """One step with every gradient multiplied by `factor`, a device scalar; none where that is not finite."""
        fused = backend().has_adamw(factor)
        if not fused and not backend().is_finite(factor):
            return
        # Shared by all parameters.
        step = next(iter(self.state.values()))["step"].add_(torch.isfinite(factor))
        for group in self.param_groups:
            settings = {name: group[name] for name in ("lr", "betas", "eps")} | {"decay": group["weight_decay"]}
            settings["corrections"] = bias_corrections(step, group["betas"])
            for parameter in group["params"]:
                gradient = self._masters.gradient(parameter)
                if gradient is None:
                    continue
                state = self.state[parameter]
                halves = (parameter.data, self._masters.low(parameter))
                moments = (state["exp_avg"], state["exp_avg_sq"])
                if fused:
                    backend().adamw_(halves, gradient, moments, factor, **settings)
                else:
                    plain_update(halves, gradient, moments, factor, settings)


Pair = tuple[Tensor, Tensor]


def bias_corrections(step: Tensor, betas: tuple[float, float]) -> Tensor:
    """Adam's bias corrections after `step` steps; in double, because both stay near one for long."""
    return torch.stack([1 - beta ** step.double() for beta in betas]).float()


def plain_update(halves: Pair, gradient: Tensor, moments: Pair, factor: Tensor, settings: dict[str, Any]) -> None:
    """The same update in torch operators: the reference for the kernel, and what other devices run."""
    beta1, beta2 = settings["betas"]
    first, second = moments
    weight = join(*halves)
    g = gradient.float() * factor
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    correction1, correction2 = settings["corrections"]
    denominator = (second / correction2).sqrt_().add_(settings["eps"])
    weight.mul_(1 - settings["lr"] * settings["decay"])
    weight.addcdiv_(first / correction1, denominator, value=-settings["lr"])
    for half, new in zip(halves, split(weight), strict=True):
        half.copy_(new)
