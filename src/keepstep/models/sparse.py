"""N:M sparse linear layers: of every M neighbouring inputs of an output, the N weights of largest magnitude count.

The example of a linear plug-in: `model.linear=sparse` is short for `keepstep.models.sparse:sparse_linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.core.errors import ConfigError


class SparseLinear(nn.Linear):
    """All weights are kept for the optimizer, and each forward pass chooses the mask again.

    Gradients pass the mask as if it were not there (straight-through), so that a weight that does not count now can
    grow until it does.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, n: int, m: int) -> None:
        super().__init__(in_features, out_features, bias)
        self.n, self.m = n, m

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """Multiply with the weights that count."""
        kept = torch.where(n_of_m_mask(self.weight, self.n, self.m), self.weight, 0.0)
        return F.linear(input, self.weight + (kept - self.weight).detach(), self.bias)


def n_of_m_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """True for the n largest magnitudes of each m neighbours in a row; of equal ones the first."""
    groups = weight.detach().abs().unflatten(-1, (-1, m))
    # A stable sort: topk may choose any of equal values, and another one on another device.
    largest = groups.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, largest, True).flatten(-2)


def sparse_linear(in_features: int, out_features: int, bias: bool, n: int = 2, m: int = 4) -> nn.Linear:
    """A layer in which n of every m weights count."""
    if {type(n), type(m)} != {int} or not 0 < n < m:
        raise ConfigError(f"model.linear_options has n {n} and m {m}, but 0 < n < m", "linear_options={n: 2, m: 4}")
    if in_features % m:
        raise ConfigError(
            f"model.linear_options has m {m}, but a layer with {in_features} inputs does not divide by it",
            "choose an m that divides model.hidden and model.ffn_hidden, for example 4",
        )
    return SparseLinear(in_features, out_features, bias, n, m)
