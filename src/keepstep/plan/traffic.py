"""Bytes that the device's memory moves beside products of matrices: norms, rotary, activations, loss, optimizer.

Eager kernels read and write every intermediate tensor; compiled ones only what enters and leaves a fused group. The
eager figures are sums over the operations of models/*.py, counted by hand; the step times of docs/planning.md, within
10% of twelve measured runs, are what they are held against.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.plan.parameters import StageParameters
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class _Widths:
    """Bytes a token moves for each number it has in the residual stream, in queries, in keys and in the inner width."""

    hidden: float
    query: float
    key: float
    inner: float


# Forward, then backward. In bf16; fp32 moves twice as much except where the code computes in fp32 anyway.
_EAGER = {
    "norm": (_Widths(8, 0, 0, 0), _Widths(12, 0, 0, 0)),
    "residual": (_Widths(12, 0, 0, 0), _Widths(12, 0, 0, 0)),
    "rotary": (_Widths(0, 48, 48, 0), _Widths(0, 50, 50, 0)),
    "split": (_Widths(0, 0, 0, 0), _Widths(0, 22, 42, 0)),
    "swiglu": (_Widths(0, 0, 0, 6), _Widths(0, 0, 0, 10)),
    "gelu": (_Widths(0, 0, 0, 4), _Widths(0, 0, 0, 6)),
    "bias": (_Widths(0, 0, 0, 0), _Widths(4, 2, 4, 2)),
}
_COMPILED = {
    "norm": (_Widths(8, 0, 0, 0), _Widths(10, 0, 0, 0)),
    "residual": (_Widths(4, 0, 0, 0), _Widths(4, 0, 0, 0)),
    "rotary": (_Widths(0, 4, 4, 0), _Widths(0, 4, 4, 0)),
    "split": (_Widths(0, 0, 0, 0), _Widths(0, 2, 4, 0)),
    "swiglu": (_Widths(0, 0, 0, 6), _Widths(0, 0, 0, 10)),
    "gelu": (_Widths(0, 0, 0, 4), _Widths(0, 0, 0, 6)),
    "bias": (_Widths(0, 0, 0, 0), _Widths(4, 2, 4, 2)),
}

LOGIT_BYTES = 10
"""For each token and row of the head, logits are written, read and overwritten by a gradient that is read twice."""
UPDATE_BYTES = 40
"""For each parameter: norm, clipping and Adam read 28 and write 12."""
WHOLE_UPDATE_BYTES = 28
"""The same for one process alone, whose gradients and halves of weights are 2 bytes each."""
CAST_BYTES = 20
"""For each parameter: masters are cast and copied out for forward, and again for backward."""
FROZEN_BYTES = 8
"""For each parameter that is not trained, in compute precision already: copied out for forward and for backward."""
REDUCE_BYTES = 14
"""For each parameter: gradients are widened into the reduction's buffer and copied to their place."""


def block_traffic(work: Workload) -> float:
    """Bytes one token moves in one block in forward and backward, with what is computed again, on one process."""
    model, tensor = work.model, work.degrees.tensor
    table = _COMPILED if work.compiled else _EAGER
    names = ["norm", "residual", "split", "swiglu" if model.activation == "swiglu" else "gelu"]
    names += ["rotary"] * (model.positions == "rotary") + ["bias"] * model.bias
    forward = backward = 0.0
    for name in names:
        once, again = (_moved(each, work) for each in table[name])
        forward, backward = forward + once, backward + again
    recomputed = 0.0 if work.recompute == "none" else forward
    gathered = 0.0 if tensor == 1 else 16.0 * model.hidden
    # Every step of the ring reads and rewrites the fp32 output so far, and its gradient on the way back.
    ring = 36.0 * (work.degrees.context - 1) * model.heads * model.head_size / tensor
    return (forward + backward + recomputed) * work.compute_bytes / 2 + gathered + ring


def _moved(widths: _Widths, work: Workload) -> float:
    model, tensor = work.model, work.degrees.tensor
    return (
        widths.hidden * model.hidden
        + widths.query * model.heads * model.head_size
        + widths.key * model.key_value_heads * model.head_size
        + widths.inner * model.ffn_size
    ) / tensor


def head_traffic(work: Workload) -> float:
    """Bytes one token moves in head and loss on one process."""
    return LOGIT_BYTES * work.model.padded_vocab / work.degrees.tensor


def weight_traffic(work: Workload, counts: StageParameters) -> float:
    """Bytes that gathering and reducing a stage's weights move in one micro batch, beside what the network carries."""
    if work.whole:
        return 0.0
    copied = CAST_BYTES * counts.trained + (FROZEN_BYTES * counts.total if counts.adapters else 0)
    reduced = REDUCE_BYTES * counts.trained
    return (copied / 2 + reduced) / work.microbatches if work.stays_gathered else float(copied + reduced)


def update_traffic(work: Workload, parameters: int) -> float:
    """Bytes that clipping and the update move in one step."""
    if work.whole:
        return float(WHOLE_UPDATE_BYTES * parameters)
    return UPDATE_BYTES * parameters / work.degrees.weight_shards
