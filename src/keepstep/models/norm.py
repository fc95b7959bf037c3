"""Normalisation. Both kinds compute in fp32 inside torch's kernels and answer in the precision of their input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig


class LayerNorm(nn.Module):
    """Mean zero, variance one, times a weight, plus a bias where there is one."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square one, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm before each sub-block and at the end."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, config.norm_eps)
    return LayerNorm(config.hidden, config.norm_eps, config.bias)
