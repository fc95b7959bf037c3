"""How one block computes: decided once, when the model is spread over processes, and frozen.

The decision needs facts from several rooms (tensor and context parallelism, recomputation, the kernels that this GPU
has), so `parallel/apply.py` makes the plan and the block only reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from keepstep.models.ops.chunked_mlp import MlpChunks

RecomputeMode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class BlockPlan:
    """One block's plan. The defaults suit a whole model on one device."""

    fused_matmuls: bool = True
    """Matmuls take what surrounds them as epilogues: rope, activation, residual. Selective recomputation says no: it
    keeps the plain outputs of matmuls."""
    tensor_parallel: bool = False
    """Collectives run between a sub-block's two matmuls, so no operator spans both."""
    fused_attention: bool = False
    """Causal attention uses our own operator, whose backward kernels include rope; packed documents and windows too."""
    deferred_add: bool = False
    """The block's last addition is left to the next norm, one kernel for both. FSDP wants outputs that are no views."""
    recompute: RecomputeMode = "none"
    """What the backward pass computes again. `full` keeps the block's input and the output of attention only."""
    mlp_chunks: MlpChunks | None = None
    """The feed-forward runs over chunks of tokens; None makes no chunks."""
    first_head: int = 0
    """Number of the first local query head; ALiBi slopes depend on it."""
    attend: Callable[..., Tensor] | None = None
    """Ring attention under context parallelism; None is scaled dot-product attention on this device."""

    @property
    def spans_matmuls(self) -> bool:
        """Whether one operator may span a sub-block's two matmuls and what is between them."""
        return self.fused_matmuls and not self.tensor_parallel
