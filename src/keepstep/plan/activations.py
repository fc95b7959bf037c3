"""What one block keeps between forward and backward, from the decoder's own operations.

The lists below follow models/transformer.py, attention.py and mlp.py line by line: a tensor is counted when autograd
saves it, or when it is the storage behind a saved view. tests/plan holds the sums against a trace of the real model.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.config.schema import ModelConfig
from keepstep.plan.workload import Workload

FP32 = 4


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block for one micro batch on one process."""

    kept: int
    """From forward to backward."""
    whole: int
    """Everything backward needs, after what was not kept has been computed again."""
    working: int
    """What backward adds on top at its worst: gradients of the feed-forward's inner tensors."""


@dataclass(frozen=True)
class _Widths:
    """Numbers a token has in each tensor of a block; the tensor axis splits heads and feed-forward."""

    hidden: int
    query: int
    key: int
    qkv: int
    ffn: int
    heads: int

    @classmethod
    def of(cls, model: ModelConfig, tensor: int) -> _Widths:
        query, key = model.heads * model.head_size // tensor, model.key_value_heads * model.head_size // tensor
        return cls(model.hidden, query, key, query + 2 * key, model.ffn_size // tensor, model.heads // tensor)


def block_activations(work: Workload) -> BlockActivations:
    """Bytes kept, needed and used in passing by one block."""
    model, size, tokens = work.model, work.compute_bytes, work.tokens_per_microbatch
    widths = _Widths.of(model, work.degrees.tensor)
    gated = model.activation == "swiglu"
    whole = _saved_bytes(model, widths, work) + _saved_statistics(model, widths)
    match work.recompute:
        case "none":
            kept = whole
        case "selective":
            products = widths.qkv + widths.hidden + (2 if gated else 1) * widths.ffn + widths.hidden
            # Products in fp8 are cheap enough to do again; attention's output is kept.
            products = widths.query + (0 if work.precision == "fp8" else products)
            kept = size * (stream_width(work) + products) + FP32 * widths.heads
        case "full":
            kept = size * stream_width(work)
    # Gradients of the inner tensors take the place of the forward's product, which has just gone, and more.
    working = size * ((2 if gated else 1) * widths.ffn + stream_width(work))
    quantised = _quantised_weights(model, widths) if work.precision == "fp8" else 0
    kept_weights = quantised if work.recompute == "none" else 0
    return BlockActivations(kept * tokens + kept_weights, whole * tokens + quantised, working * tokens)


def stream_width(work: Workload) -> int:
    """Numbers a token has in the residual stream: with a tensor axis each process holds its part of the row."""
    return work.model.hidden // work.degrees.tensor


def _saved_bytes(model: ModelConfig, widths: _Widths, work: Workload) -> int:
    """Bytes a token leaves behind, but for statistics, when nothing is recomputed."""
    rotary = model.positions == "rotary"
    gated = model.activation == "swiglu"
    kept = [
        stream_width(work),  # the block's input, kept by its norm
        widths.qkv,  # queries, keys and values apart where one kernel splits and turns, else all that they are views of
        widths.query + widths.key if model.qk_norm else 0,
        # Queries lie apart by group: one head after another needs a copy where a group has several.
        widths.query if not (rotary or model.qk_norm) and model.heads > model.key_value_heads else 0,
        widths.qkv if model.clip_qkv else 0,
        widths.query,  # attention's output, kept by attention and by the output projection
        stream_width(work),  # the input of the feed-forward's norm
        (2 if gated else 1) * widths.ffn,  # what goes into the activation
        # Adapters keep the inputs that the weights' own gradients would, and their narrow middle.
        work.lora_rank * len(work.lora_targets),
    ]
    # What products keep of their inputs: both norms' outputs and the activation's.
    inputs = 2 * widths.hidden + widths.ffn
    if work.precision == "fp8":
        # Each product has a copy of its input in fp8, one byte a number, attention's output included.
        return work.compute_bytes * sum(kept) + inputs + widths.query
    return work.compute_bytes * (sum(kept) + inputs)


def _quantised_weights(model: ModelConfig, widths: _Widths) -> int:
    """Bytes of a block's weights in fp8, which each product keeps for its backward."""
    inner = 3 if model.activation == "swiglu" else 2
    return widths.hidden * (widths.qkv + widths.query + inner * widths.ffn)


def _saved_statistics(model: ModelConfig, widths: _Widths) -> int:
    """Bytes a token leaves behind in fp32 or as booleans: norms' statistics, softmax sums, dropout masks."""
    norm = FP32 * (1 if model.norm == "rmsnorm" else 2)
    heads = FP32 * (widths.heads + widths.key // model.head_size) if model.qk_norm else 0
    dropout = 2 * model.hidden if model.dropout else 0
    return 2 * norm + FP32 * widths.heads + heads + dropout


def mask_bytes(work: Workload) -> int:
    """A mask made once a forward and shared by all blocks; plain causal attention needs none."""
    model, rows = work.model, work.model.seq_len // work.degrees.context
    if model.positions == "alibi":
        return work.compute_bytes * model.heads * rows * model.seq_len
    return rows * model.seq_len if 0 < model.sliding_window < model.seq_len else 0
