"""The feed-forward sub-block.

Shape legend: b rows, t tokens, d hidden, f feed-forward width, c blocks of the fused gate, w = f / c.

Layout of `gate_up.weight` [2·f, d] (gated): c = gcd(key-value heads, f) blocks; in a block first w gate rows, then the
w up rows they multiply. Any contiguous slice of whole blocks is a smaller feed-forward of its own, for every
tensor-parallel degree that attention allows and the width can be divided by.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.block_plan import BlockPlan
from keepstep.models.linear import Fp8Linear, fp8_swiglu_mlp, is_dense, is_plain, make_linear
from keepstep.models.ops.backend import backend
from keepstep.models.ops.chunked_mlp import chunked_mlp
from keepstep.models.ops.fp8 import Fp8Rows
from keepstep.models.ops.fused_mlp import gelu_mlp, swiglu_mlp
from keepstep.models.ops.matmul import matmul_add
from keepstep.models.ops.swiglu import swiglu


def gate_blocks(config: ModelConfig) -> int:
    """Blocks of the fused gate: as many tensor-parallel slices as attention could have, where the width allows."""
    return gcd(config.key_value_heads, config.ffn_size)


class _MLP(nn.Module):
    plan: BlockPlan

    def forward(self, x_btd: Tensor | Fp8Rows, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual; added to the residual where that is given."""
        chunks = self.plan.mlp_chunks
        if isinstance(x_btd, Fp8Rows) or chunks is None or x_btd.shape[:-1].numel() <= chunks.tokens:
            return self.compute(x_btd, residual_btd)
        output_btd = chunked_mlp(self, x_btd, chunks)
        return output_btd if residual_btd is None else residual_btd + output_btd

    def compute(self, x_btd: Any, residual_btd: Tensor | None = None) -> Tensor:
        """The same without chunks."""
        raise NotImplementedError


class GatedMLP(_MLP):
    """SwiGLU, silu(gate) × up, then down; GEGLU has gelu by tanh in place of silu, and no fused operators."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_swiglu = config.activation == "swiglu"
        self.block_width = config.ffn_size // gate_blocks(config)
        self.gate_up = make_linear(config, "up", config.hidden, 2 * config.ffn_size, config.bias)
        self.down = make_linear(config, "down", config.ffn_size, config.hidden, config.bias)
        self.plan = BlockPlan()

    def compute(self, x_btd: Tensor | Fp8Rows, residual_btd: Tensor | None = None) -> Tensor:
        """The same without chunks."""
        fp8 = self._fp8_linears()
        if fp8 is not None:
            return fp8_swiglu_mlp(x_btd, *fp8, self.block_width)
        assert isinstance(x_btd, Tensor)
        if residual_btd is not None or (self.fuses_residual() and backend().fuses_matmuls(x_btd)):
            weights = self.gate_up.weight.to(x_btd.dtype), self.down.weight.to(x_btd.dtype)
            return swiglu_mlp(x_btd, *weights, self.block_width, residual_btd)
        gate_up = self.gate_up(x_btd)
        # Torch's own operators are as fast on a CPU, and can be differentiated twice.
        has_kernel = self.is_swiglu and backend().has_kernels(gate_up)
        activation = swiglu(gate_up, self.block_width) if has_kernel else self._plain_glu(gate_up)
        output_btd: Tensor = self.down(activation)
        return output_btd

    def fuses_residual(self) -> bool:
        """Whether both matmuls may be fused: SwiGLU inside, the residual in the last one's epilogue."""
        return self.is_swiglu and self.plan.spans_matmuls and is_plain(self.gate_up) and is_plain(self.down)

    def takes_fp8(self) -> bool:
        """Whether the input may be in fp8: one matmul is all that it enters."""
        return self._fp8_linears() is not None and self.plan.mlp_chunks is None

    def _fp8_linears(self) -> tuple[Fp8Linear, Fp8Linear] | None:
        """Both matmuls, if they pass fp8 numbers on to each other."""
        if not self.is_swiglu or self.plan.tensor_parallel:
            return None
        gate_up, down = self.gate_up, self.down
        return (gate_up, down) if isinstance(gate_up, Fp8Linear) and isinstance(down, Fp8Linear) else None

    def _plain_glu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unflatten(-1, (-1, 2, self.block_width)).unbind(-2)
        activation: Tensor = (F.silu(gate) if self.is_swiglu else F.gelu(gate, approximate="tanh")) * up
        return activation.flatten(-2)


class PlainMLP(_MLP):
    """Up, GELU (exact or by tanh), down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.plan = BlockPlan()
        self.by_tanh = config.activation == "gelu_tanh"
        self.up = make_linear(config, "up", config.hidden, config.ffn_size, config.bias)
        self.down = make_linear(config, "down", config.ffn_size, config.hidden, config.bias)

    def compute(self, x_btd: Tensor, residual_btd: Tensor | None = None) -> Tensor:
        """The same without chunks."""
        if self._fuses_gelu() and backend().fuses_matmuls(x_btd):
            return gelu_mlp(x_btd, self.up, self.down, self.by_tanh, residual_btd)
        wide_btf = F.gelu(self.up(x_btd), approximate="tanh" if self.by_tanh else "none")
        if residual_btd is not None:
            return matmul_add(wide_btf, self.down.weight.to(wide_btf.dtype), residual_btd)
        output_btd: Tensor = self.down(wide_btf)
        return output_btd

    def fuses_residual(self) -> bool:
        """Whether the last matmul may add the residual in its epilogue."""
        return self.plan.spans_matmuls and is_plain(self.down)

    def _fuses_gelu(self) -> bool:
        return self.plan.spans_matmuls and is_dense(self.up) and is_dense(self.down)


def make_mlp(config: ModelConfig) -> GatedMLP | PlainMLP:
    """The feed-forward sub-block that `model.activation` names."""
    return GatedMLP(config) if config.gated else PlainMLP(config)


def pack_gate_up(gate: Tensor, up: Tensor, blocks: int) -> Tensor:
    """Separate gate and up projections, each [f, ...] (weights or biases), in the blocked layout of `gate_up`."""
    block_shape = (blocks, -1, *gate.shape[1:])
    return torch.stack([gate.reshape(block_shape), up.reshape(block_shape)], dim=1).flatten(0, 2)


def unpack_gate_up(packed: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_gate_up`."""
    gate, up = packed.reshape(blocks, 2, -1, *packed.shape[1:]).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)
