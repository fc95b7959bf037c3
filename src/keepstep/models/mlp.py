"""The feed-forward sub-block.

Shape legend: b rows, t tokens, d hidden, f feed-forward width, c blocks of the fused gate, w = f / c.

Layout of `gate_up.weight` [2·f, d] (swiglu): c = gcd(key-value heads, f) blocks; in a block first w gate rows, then the
w up rows they multiply. Any contiguous slice of whole blocks is a smaller feed-forward of its own, for every
tensor-parallel degree that attention allows and the width can be divided by.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.activated import activated
from keepstep.models.added import add_product
from keepstep.models.fp8 import Fp8Linear, fp8_gated
from keepstep.models.gated import gated
from keepstep.models.linear import is_dense, is_plain, make_linear
from keepstep.models.swiglu import swiglu


def gate_blocks(config: ModelConfig) -> int:
    """Blocks of the fused gate: as many tensor-parallel slices as attention could have, where the width allows."""
    return gcd(config.key_value_heads, config.ffn_size)


class GatedMLP(nn.Module):
    """SwiGLU: silu(gate) × up, then down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.block_width = config.ffn_size // gate_blocks(config)
        self.gate_up = make_linear(config.linear, config.hidden, 2 * config.ffn_size, config.bias)
        self.down = make_linear(config.linear, config.ffn_size, config.hidden, config.bias)
        self.joined = True
        """Whether one operator may span both products; tensor parallelism works between them and says no."""
        self.keeps_activation = True
        """Whether what is between the products may be kept for the backward pass; selective recomputation says no."""

    def forward(self, x_btd: Tensor, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual; added to the residual where that is given."""
        if residual_btd is not None:
            weights = self.gate_up.weight.to(x_btd.dtype), self.down.weight.to(x_btd.dtype)
            return gated(x_btd, *weights, self.block_width, residual_btd)
        if self.joined and isinstance(self.gate_up, Fp8Linear) and isinstance(self.down, Fp8Linear):
            return fp8_gated(x_btd, self.gate_up, self.down, self.block_width)
        if self._spans_products() and x_btd.is_cuda:
            return gated(x_btd, self.gate_up.weight.to(x_btd.dtype), self.down.weight.to(x_btd.dtype), self.block_width)
        fused = self.gate_up(x_btd)
        # Torch's own operators are as fast on a CPU, and can be differentiated twice.
        product = swiglu(fused, self.block_width) if fused.is_cuda else self._plain_swiglu(fused)
        output_btd: Tensor = self.down(product)
        return output_btd

    def adds_inside(self) -> bool:
        """Whether the last product may take the residual."""
        return self._spans_products()

    def _spans_products(self) -> bool:
        return self.joined and self.keeps_activation and is_plain(self.gate_up) and is_plain(self.down)

    def _plain_swiglu(self, fused: Tensor) -> Tensor:
        gate, up = fused.unflatten(-1, (-1, 2, self.block_width)).unbind(-2)
        product: Tensor = F.silu(gate) * up
        return product.flatten(-2)


class PlainMLP(nn.Module):
    """Up, GELU (exact or by tanh), down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.joined = True
        """Whether products may be joined with what is around them; tensor parallelism says no."""
        self.keeps_activation = True
        """Whether what is between the products may be kept for the backward pass; selective recomputation says no."""
        self.by_tanh = config.activation == "gelu_tanh"
        self.up = make_linear(config.linear, config.hidden, config.ffn_size, config.bias)
        self.down = make_linear(config.linear, config.ffn_size, config.hidden, config.bias)

    def forward(self, x_btd: Tensor, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual; added to the residual where that is given."""
        if x_btd.is_cuda and self._spans_products():
            return activated(x_btd, self.up, self.down, self.by_tanh, residual_btd)
        wide_btf = F.gelu(self.up(x_btd), approximate="tanh" if self.by_tanh else "none")
        if residual_btd is not None:
            return add_product(wide_btf, self.down.weight.to(wide_btf.dtype), residual_btd)
        output_btd: Tensor = self.down(wide_btf)
        return output_btd

    def adds_inside(self) -> bool:
        """Whether the last product may take the residual."""
        return self.joined and is_plain(self.down)

    def _spans_products(self) -> bool:
        return self.joined and self.keeps_activation and is_dense(self.up) and is_dense(self.down)


def make_mlp(config: ModelConfig) -> GatedMLP | PlainMLP:
    """The feed-forward sub-block that `model.activation` names."""
    return GatedMLP(config) if config.activation == "swiglu" else PlainMLP(config)


def pack_gate_up(gate: Tensor, up: Tensor, blocks: int) -> Tensor:
    """Separate gate and up projections, each [f, ...] (weights or biases), in the blocked layout of `gate_up`."""
    block_shape = (blocks, -1, *gate.shape[1:])
    return torch.stack([gate.reshape(block_shape), up.reshape(block_shape)], dim=1).flatten(0, 2)


def unpack_gate_up(packed: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_gate_up`."""
    gate, up = packed.reshape(blocks, 2, -1, *packed.shape[1:]).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)
