"""Memory traffic outside matmuls: norms, rope, activations, casts, loss, optimizer.

The figures are the bytes that kernels read and write per element, counted over models/*.py; for a kernel that is slower
than the memory on an H200, the bytes that would take its time. Fused epilogues of matmuls cost nothing here.
`benchmarks/plan_truth.py` compares the resulting step times with measured ones (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.models.size import active_width, token_copies
from keepstep.plan.cluster import Gpu
from keepstep.plan.tensors import StageParameters, adapted_linears, chunk_sums
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class _Widths:
    """Bytes per element that a token has in the residual stream, queries, keys, feed-forward and copies."""

    hidden: float = 0
    query: float = 0
    key: float = 0
    inner: float = 0
    copies: float = 0
    """Of the residual stream, for each copy of a token that is sorted by expert."""


_NOTHING = _Widths()
# Forward, then backward. In bf16; fp32 moves twice as much except where the code computes in fp32 anyway.
_OWN = {
    # A block's two norms; their backward also adds the gradient of the residual stream.
    "rms norm": (_Widths(hidden=9), _Widths(hidden=20)),
    "sums before rms norms": (_Widths(hidden=10), _NOTHING),
    "rope": (_Widths(query=4, key=8), _Widths(query=4, key=8)),
    "swiglu": (_Widths(inner=6), _Widths(inner=10)),
    # cuDNN's kernels before and after its backward; the last is for query heads that share keys.
    "around attention": (_NOTHING, _Widths(query=14.5)),
    "shared keys": (_NOTHING, _Widths(query=12)),
    "bias": (_NOTHING, _Widths(4, 2, 4, 2)),
    # Copy rows to their experts, add up outputs; in reverse also copy the inputs again. The router reads the input.
    "experts": (_Widths(hidden=8, copies=4), _Widths(hidden=12, copies=6)),
}
_EAGER = {
    **_OWN,
    "layer norm": (_Widths(hidden=17), _Widths(hidden=37)),
    "sums": (_Widths(hidden=12), _Widths(hidden=12)),
    "unfused rope": (_Widths(query=48, key=48), _Widths(query=50, key=50)),
    "split": (_NOTHING, _Widths(query=30, key=60)),
    "gelu": (_Widths(inner=6), _Widths(inner=8.6)),
}
_COMPILED = {
    **_OWN,
    "layer norm": (_Widths(hidden=10), _Widths(hidden=10)),
    "sums": (_Widths(hidden=8), _Widths(hidden=8)),
    "unfused rope": (_Widths(query=4, key=4), _Widths(query=4, key=4)),
    "split": (_NOTHING, _Widths(query=4, key=8)),
    "gelu": (_Widths(inner=6.7), _Widths(inner=10)),
}

CAST_TO_FP8_BYTES = 6
"""Per element of experts that enters an fp8 matmul: read, written, and written again transposed."""
_QUANTISED = _Widths(4, 4, 4, 4)
"""The same of dense layers, by what it is an element of: read once, and written twice."""
_WRITTEN_IN_FP8 = _Widths(hidden=2, query=4, key=4)
"""More than writing bf16, where norms and SwiGLU write fp8 themselves: the norm's rows are read again."""
TOKENS_TO_FP8_BYTES = 3
"""The same where the weight is frozen in fp8: no transposed copy, as there is no gradient of the weight."""
_OWN_HEAD_SIZE = 64
"""Head size of our own kernels: the query-key-value matmul with fused rope, and the backward of attention."""
LOGIT_BYTES = 7
"""Per logit: read for maximum and sum, then overwritten by its gradient."""
TRANSPOSED_LOGIT_BYTES = 2
"""Per logit more where the head's gradients are computed in fp8."""
UPDATE_BYTES = 40
"""Per parameter: norm, clipping and Adam read 28 and write 12."""
UNSHARDED_UPDATE_BYTES = 28
"""The same without FSDP: gradients and the two halves of weights are 2 bytes each."""
CAST_BYTES = 20
"""Per parameter: masters are cast and copied for forward, and again for backward."""
FROZEN_BYTES = 8
"""Per frozen parameter, already in compute precision: copied for forward and for backward."""
REDUCE_BYTES = 14
"""Per parameter: gradients are cast into the buffer of the reduction and copied out of it."""


def block_traffic(work: Workload, gpu: Gpu) -> float:
    """Bytes per token of one block in forward, backward and recomputation, on one process."""
    model, tensor = work.model, work.degrees.tensor
    table = _COMPILED if work.compiled else _EAGER
    forward = backward = 0.0
    for name in _kernels(work, gpu):
        once, again = (_moved(each, work) for each in table[name])
        forward, backward = forward + once, backward + again
    if work.matmul_precision == "fp8":
        operands = _fp8_widths(work)
        forward, backward = forward + _moved(operands[0], work), backward + _moved(operands[1], work)
    for _, inputs, outputs in adapted_linears(work):
        # The output is copied and then added to; gradients of inputs come from two matmuls and are summed.
        forward += (8 * outputs + 2 * inputs) / tensor
        backward += (4 * outputs + 10 * inputs) / tensor
    recomputed = 0.0 if work.recompute == "none" else forward
    if work.chunks_mlp:
        # Each chunk reads and writes the sums of the weights' gradients.
        recomputed += 2 * chunk_sums(work) / work.mlp_tokens
        recomputed += _moved(_Widths(inner=6), work) if work.recompute == "none" else 0.0
    gathered = 0.0 if tensor == 1 else 16.0 * model.hidden
    # Every step of the ring reads and writes the fp32 output so far, and its gradient in backward.
    ring = 36.0 * (work.degrees.context - 1) * model.heads * model.head_size / tensor
    return (forward + backward + recomputed) * work.compute_bytes / 2 + gathered + ring


def _fp8_widths(work: Workload) -> tuple[_Widths, _Widths]:
    """Bytes that become fp8 operands, per number of each width, in forward and in backward."""
    model, gates = work.model, 2 if work.model.gated else 1
    if work.precision != "fp8" or model.expert_layers:
        cast = CAST_TO_FP8_BYTES if work.precision == "fp8" else TOKENS_TO_FP8_BYTES
        return _Widths(2 * cast, cast, 0, cast), _Widths(2 * cast, cast, 2 * cast, gates * cast)
    direct = work.degrees.tensor == 1 and not work.chunks_mlp and model.norm == "rmsnorm"
    once = _WRITTEN_IN_FP8 if direct else _QUANTISED
    inner = once.inner if model.activation == "swiglu" else _QUANTISED.inner
    gradients = _Widths(2 * _QUANTISED.hidden, _QUANTISED.query, 2 * _QUANTISED.key, gates * inner)
    return _Widths(2 * once.hidden, once.query, 0, inner), gradients


def _kernels(work: Workload, gpu: Gpu) -> Iterator[str]:
    """The kernels of a block outside matmuls, as models/ chooses them."""
    model = work.model
    fused = _fuses_matmuls(work)
    placed = model.norm_placement == "before" and model.residual_multiplier == 1.0
    plain = fused and not model.bias and placed and model.activation != "geglu_tanh"
    sums_inside = plain and not model.expert_layers and work.unsharded and work.recompute == "none"
    for _ in range(2 if model.norm_placement == "both" else 1):
        yield "layer norm" if model.norm == "layernorm" else "rms norm"
    if not sums_inside:
        yield "sums before rms norms" if model.norm == "rmsnorm" else "sums"
    own_attention = fused and gpu.is_hopper and model.head_size == _OWN_HEAD_SIZE and model.plain_rope
    own_attention = own_attention and not model.attention_multiplier and model.kernel_scores
    if not own_attention:
        yield "around attention"
        if model.key_value_heads != model.heads:
            yield "shared keys"
    if model.positions == "rotary" and model.plain_rope:
        if not (own_attention and plain):
            yield "rope"
    else:
        yield "split"
        if model.positions == "rotary":
            yield "unfused rope"
    if model.gated:
        if model.expert_layers or not (plain and gpu.is_hopper):
            yield "swiglu"
    elif not (fused and gpu.is_hopper):
        yield "gelu"
    if model.bias:
        yield "bias"
    if model.expert_layers:
        yield "experts"


def _fuses_matmuls(work: Workload) -> bool:
    """Whether matmuls may have fused epilogues."""
    if work.precision not in ("bf16", "fp16") or work.lora_rank:
        return False
    return work.fused_matmuls and work.degrees.tensor == 1 and work.recompute != "selective"


def _moved(widths: _Widths, work: Workload) -> float:
    model, tensor = work.model, work.degrees.tensor
    return (
        widths.hidden * model.hidden
        + widths.query * model.heads * model.head_size
        + widths.key * model.key_value_heads * model.head_size
        + widths.inner * active_width(model)
        + widths.copies * token_copies(model) * model.hidden
    ) / tensor


def head_traffic(work: Workload) -> float:
    """Bytes per token of head and loss on one process."""
    each = LOGIT_BYTES + (TRANSPOSED_LOGIT_BYTES if work.fp8_head else 0)
    return each * work.model.padded_vocab / work.degrees.tensor


def weight_traffic(work: Workload, counts: StageParameters) -> float:
    """Bytes of local memory moved by gathering and reducing a stage's weights in one micro batch."""
    quantised = _quantised_traffic(work, counts)
    if work.unsharded:
        return quantised
    copied = CAST_BYTES * counts.trained + (
        FROZEN_BYTES * (counts.total - counts.quantised_total) if counts.adapters else 0
    )
    reduced = REDUCE_BYTES * counts.trained
    return quantised + ((copied / 2 + reduced) / work.microbatches if work.stays_gathered else copied + reduced)


def _quantised_traffic(work: Workload, counts: StageParameters) -> float:
    """Bytes moved in one micro batch to read and write frozen matrices in the form that matmuls need."""
    passes = 3 if work.recompute == "full" else 2
    # fp8 is transposed for backward; NF4 is written in compute precision for every pass.
    each = {"bf16": 0.0, "fp8": 2.0, "nf4": passes * (0.5 + work.compute_bytes)}[work.lora_base]
    return each * counts.quantised_total


def update_traffic(work: Workload, parameters: int) -> float:
    """Bytes moved by clipping and the update in one step."""
    if work.unsharded:
        return float(UNSHARDED_UPDATE_BYTES * parameters)
    return UPDATE_BYTES * parameters / work.degrees.weight_shards
