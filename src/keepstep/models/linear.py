"""The linear modules a block can be made of. A new kind is a class here and a line in `make_linear`.

A kind keeps its parameters as `weight` [out, in] and `bias` [out] or None: initialisation, tensor parallelism,
checkpoints and import from Hugging Face then work with it unchanged.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.core.errors import ConfigError
from keepstep.models.fp8 import Fp8Linear

LinearKind = Literal["dense", "bitnet", "fp8"]


class BitLinear(nn.Linear):
    """BitNet b1.58: weights of -1, 0 or 1 with one scale, activations in 255 steps a token.

    Full-precision weights are kept for the optimizer. Gradients pass the rounding as if it were not there
    (straight-through), so that small updates add up until a weight changes its step.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """Multiply what both sides round to."""
        return F.linear(_straight_through(input, _round_tokens(input)), self._ternary_weight(), self.bias)

    def _ternary_weight(self) -> Tensor:
        return _straight_through(self.weight, _round_ternary(self.weight))


def _straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    return exact + (rounded - exact).detach()


def _round_ternary(weight: Tensor) -> Tensor:
    # The mean magnitude is the scale: about a third of normally distributed weights become 0.
    scale = weight.abs().mean().clamp(min=1e-5)
    return (weight / scale).round().clamp(-1, 1) * scale


def _round_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
    return (x / scale).round() * scale


def is_dense(linear: nn.Module) -> bool:
    """A product with or without a bias: neither another kind nor somebody's wrapper."""
    return type(linear) is nn.Linear


def is_plain(linear: nn.Module) -> bool:
    """A product and nothing else."""
    return type(linear) is nn.Linear and linear.bias is None


def make_linear(kind: LinearKind, in_features: int, out_features: int, bias: bool) -> nn.Linear:
    """One linear layer inside a block, of the kind `model.linear` names."""
    match kind:
        case "dense":
            return nn.Linear(in_features, out_features, bias)
        case "bitnet":
            return BitLinear(in_features, out_features, bias)
        case "fp8":
            return Fp8Linear(in_features, out_features, bias)
        case other:
            raise ConfigError(f"model.linear is {other!r}, which is not a linear module", "known: dense, bitnet, fp8")
