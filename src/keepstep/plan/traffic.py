"""Bytes that the device's memory moves beside products of matrices: norms, turns, activations, casts, loss, optimizer.

Figures are what kernels read and write for each number, counted over models/*.py; where a kernel was slower than the
memory on an H200, the bytes that would have taken its time. What happens inside products costs nothing here.
`benchmarks/plan_truth.py` holds the step times that follow against measured ones (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.plan.cluster import Gpu
from keepstep.plan.parameters import StageParameters, adapted_linears
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class _Widths:
    """Bytes a token moves for each number it has in the residual stream, in queries, in keys and in the inner width."""

    hidden: float = 0
    query: float = 0
    key: float = 0
    inner: float = 0


_NOTHING = _Widths()
# Forward, then backward. In bf16; fp32 moves twice as much except where the code computes in fp32 anyway.
_OWN = {
    # A block's two norms; its backward pass adds what passes the norm by.
    "rms norm": (_Widths(hidden=9), _Widths(hidden=20)),
    "sums before rms norms": (_Widths(hidden=10), _NOTHING),
    "turn": (_Widths(query=4, key=8), _Widths(query=4, key=8)),
    "swiglu": (_Widths(inner=6), _Widths(inner=10)),
    # cuDNN's passes before and after its backward kernel; the last is for query heads that share keys.
    "around attention": (_NOTHING, _Widths(query=14.5)),
    "shared keys": (_NOTHING, _Widths(query=12)),
    "bias": (_NOTHING, _Widths(4, 2, 4, 2)),
}
_EAGER = {
    **_OWN,
    "layer norm": (_Widths(hidden=17), _Widths(hidden=37)),
    "sums": (_Widths(hidden=12), _Widths(hidden=12)),
    "rotary": (_Widths(query=48, key=48), _Widths(query=50, key=50)),
    "split": (_NOTHING, _Widths(query=30, key=60)),
    "gelu": (_Widths(inner=6), _Widths(inner=8.6)),
}
_COMPILED = {
    **_OWN,
    "layer norm": (_Widths(hidden=10), _Widths(hidden=10)),
    "sums": (_Widths(hidden=8), _Widths(hidden=8)),
    "rotary": (_Widths(query=4, key=4), _Widths(query=4, key=4)),
    "split": (_NOTHING, _Widths(query=4, key=8)),
    "gelu": (_Widths(inner=6.7), _Widths(inner=10)),
}

CAST_TO_FP8_BYTES = 6
"""For each number that enters a product in fp8: read, written, and written again as the other side wants it."""
_OWN_HEAD_SIZE = 64
"""Of heads whose turn a projection takes in, and whose attention has a backward kernel of our own."""
LOGIT_BYTES = 7
"""For each token and row of the head, logits are read for their maximum and sum, and overwritten by a gradient."""
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


def block_traffic(work: Workload, gpu: Gpu) -> float:
    """Bytes one token moves in one block in forward and backward, with what is computed again, on one process."""
    model, tensor = work.model, work.degrees.tensor
    table = _COMPILED if work.compiled else _EAGER
    forward = backward = 0.0
    for name in _passes(work, gpu):
        once, again = (_moved(each, work) for each in table[name])
        forward, backward = forward + once, backward + again
    if work.precision == "fp8":
        gates = 2 if model.activation == "swiglu" else 1
        forward += _moved(_Widths(2, 1, 0, 1), work) * CAST_TO_FP8_BYTES
        backward += _moved(_Widths(2, 1, 2, gates), work) * CAST_TO_FP8_BYTES
    for linear in adapted_linears(work):
        # The output is copied and then added to; gradients of inputs come from two sides and are summed.
        forward += (8 * linear.outputs + 2 * linear.inputs) / tensor
        backward += (4 * linear.outputs + 10 * linear.inputs) / tensor
    recomputed = 0.0 if work.recompute == "none" else forward
    gathered = 0.0 if tensor == 1 else 16.0 * model.hidden
    # Every step of the ring reads and rewrites the fp32 output so far, and its gradient on the way back.
    ring = 36.0 * (work.degrees.context - 1) * model.heads * model.head_size / tensor
    return (forward + backward + recomputed) * work.compute_bytes / 2 + gathered + ring


def _passes(work: Workload, gpu: Gpu) -> Iterator[str]:
    """What a block does beside its products, as models/ decides it."""
    model = work.model
    joined = _joins_products(work)
    plain = joined and not model.bias
    sums_inside = plain and work.whole and work.recompute == "none"
    yield "rms norm" if model.norm == "rmsnorm" else "layer norm"
    if not sums_inside:
        yield "sums before rms norms" if model.norm == "rmsnorm" else "sums"
    own_attention = joined and gpu.is_hopper and model.head_size == _OWN_HEAD_SIZE and not model.qk_norm
    if not own_attention:
        yield "around attention"
        if model.key_value_heads != model.heads:
            yield "shared keys"
    if model.positions == "rotary" and not model.qk_norm:
        if not (own_attention and plain):
            yield "turn"
    else:
        yield "split"
        if model.positions == "rotary":
            yield "rotary"
    if model.activation == "swiglu":
        if not (plain and gpu.is_hopper):
            yield "swiglu"
    elif not (joined and gpu.is_hopper):
        yield "gelu"
    if model.bias:
        yield "bias"


def _joins_products(work: Workload) -> bool:
    """Whether products may take in what surrounds them."""
    half = work.precision in ("bf16", "fp16")
    return (
        work.joined_products
        and half
        and work.degrees.tensor == 1
        and work.recompute != "selective"
        and not work.lora_rank
    )


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
