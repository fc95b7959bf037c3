"""The gradients of the output head by fp8 matmuls: those of its inputs and of its weights.

Logits and losses are those of bf16. A logit's gradient is its probability, less one at the target. It takes e5m2: early
in training the probabilities of 128 thousand tokens are near 2⁻¹⁷, where e4m3 ends. Inputs and weights take e4m3 and a
scale as in `models/linear.py`; sums are fp32 for the reason given there.

In a simulation with 50 and 128 thousand tokens and logits from flat to peaked, gradients differ from exact ones by 2.6
to 5.4%, 2.6% of it from e4m3, and are less than 1% too long. Rounding takes 0.3% off the sum of a row's probabilities
where logits spread as at the start of training; with e4m3 that sum would be up to 5% off.

Shape legend: n tokens of one chunk, d hidden, v rows of the head; an 8 is a tensor in fp8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.core.tokens import IGNORE_INDEX
from keepstep.models.ops.backend import backend
from keepstep.models.ops.fp8 import BACKWARD, FORWARD, to_fp8
from keepstep.models.ops.matmul import scaled_gemm_into
from keepstep.models.quantized_weight import transposed_fp8

MULTIPLE = 16
"""The tensor cores' fp8 matmuls need sizes that are multiples of this."""
_EXPONENT = 15
"""The gradient is at most 1 in magnitude, so its scale needs no search: 2 to this power brings 1 near the end of e5m2,
and probabilities down to 2⁻³¹ do not vanish. A power of two keeps 1 exact."""


class Side(NamedTuple):
    """One side of a matmul in fp8, contiguous along what is summed, and the factor that undoes its scale."""

    numbers: Tensor
    undo: Tensor


def suits_fp8(hidden_nd: Tensor, weight_vd: Tensor) -> bool:
    """Whether tensor cores take these sizes, and the device has the kernels around them."""
    whole = all(size % MULTIPLE == 0 for size in (*hidden_nd.shape, *weight_vd.shape))
    return whole and (not hidden_nd.is_cuda or backend().has_cross_entropy_fp8(hidden_nd))


def cross_entropy_fp8(logits_nv: Tensor, targets_n: Tensor, vocab: int) -> tuple[Tensor, Side]:
    """Token losses, 0 where there is no target, and the gradient of the logits."""
    compute = backend().cross_entropy_fp8 if backend().has_cross_entropy_fp8(logits_nv) else _cross_entropy_by_torch
    loss_n, gradient8_nv = compute(logits_nv, targets_n, vocab, _EXPONENT)
    return loss_n, Side(gradient8_nv, loss_n.new_full((), 2.0**-_EXPONENT))


def _cross_entropy_by_torch(logits_nv: Tensor, targets_n: Tensor, vocab: int, exponent: int) -> tuple[Tensor, Tensor]:
    counts_n, places_n1 = targets_n != IGNORE_INDEX, targets_n.clamp(min=0)[:, None]
    log_probability_nv = logits_nv[:, :vocab].log_softmax(dim=-1, dtype=torch.float32)
    at_target_n1 = log_probability_nv.gather(1, places_n1)
    # expm1: for a token the model is sure of, rounding the probability first would leave nothing of the difference.
    gradient_nv = log_probability_nv.exp_().scatter_(1, places_n1, at_target_n1.expm1()) * counts_n[:, None]
    padded_nv = torch.nn.functional.pad(gradient_nv, (0, logits_nv.shape[1] - vocab))
    return -at_target_n1.squeeze(1) * counts_n, padded_nv.mul_(2.0**exponent).to(BACKWARD)


def transposed(gradient: Side) -> Side:
    """The gradient with rows and columns exchanged."""
    return Side(transposed_fp8(gradient.numbers), gradient.undo)


def quantize_transposed(x: Tensor) -> Side:
    """A matrix in e4m3 with rows and columns exchanged."""
    return Side(*_quantize_transposed(x))


@torch.library.custom_op("keepstep::quantize_transposed", mutates_args=())
def _quantize_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    _, numbers, undo = to_fp8(x, FORWARD)
    return numbers, undo


@_quantize_transposed.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[::-1], dtype=FORWARD), x.new_empty((), dtype=torch.float32)


def multiply_into(out_mn: Tensor, left: Side, right: Side) -> None:
    """left · rightᵀ, written to `out_mn`."""
    _multiply_into(out_mn, left.numbers, right.numbers, left.undo, right.undo)


@torch.library.custom_op("keepstep::multiply_fp8_into", mutates_args=("out_mn",))
def _multiply_into(out_mn: Tensor, left_mk: Tensor, right_nk: Tensor, left_undo: Tensor, right_undo: Tensor) -> None:
    scaled_gemm_into(out_mn, left_mk, right_nk, left_undo, right_undo, fast_sums=False)


@_multiply_into.register_fake
def _(*_: Tensor) -> None:
    """Only writes."""
