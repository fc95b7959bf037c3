"""What the fp8 backward pass of experts does between its matmuls: our Triton kernels on GPUs, else torch's operators.

Gradients of weights are sums over an expert's rows, which fp8 matmuls need to find next to each other. So some tensors
are written transposed, with each expert's rows where `Runs` says.

Shape legend: n tokens, k experts of a token, m rows sorted by expert, r those rows with zeros after each expert's, d
hidden, e experts, f width of an expert; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import difference
from keepstep.models.ops.backend import proven

_RUN = 128
"""Each expert's rows begin at a multiple of it: what one step of the matmuls takes."""


class Runs(NamedTuple):
    """Where the rows of every expert are among the r."""

    ends_e: Tensor
    """Where they end among the m."""
    until_e: Tensor
    """Where they end, zeros included; the last is r."""


def runs_of(ends_e: Tensor, rows: int) -> Runs:
    """The runs of `rows` rows of experts; r does not depend on how many an expert has."""
    counts_e = torch.diff(ends_e, prepend=ends_e.new_zeros(1))
    until_e = ((counts_e + (_RUN - 1)) // _RUN * _RUN).cumsum(0).to(torch.int32)
    until_e[-1:].fill_(_padded(rows, len(ends_e)))
    return Runs(ends_e, until_e)


def _padded(rows: int, experts: int) -> int:
    return (rows + (_RUN - 1) * experts) // _RUN * _RUN


@torch.library.custom_op("keepstep::spread_transposed", mutates_args=())
def spread_transposed(source8_nd: Tensor, order_m: Tensor, ends_e: Tensor, until_e: Tensor, top_k: int) -> Tensor:
    """Token order_m[i] // top_k for each sorted row i, transposed, [d, r]; numbers of one byte."""
    rows = _padded(order_m.shape[0], ends_e.shape[0])
    if _has_kernels(source8_nd):
        from keepstep.models.kernels import experts_fp8

        return experts_fp8.spread_transposed(source8_nd.contiguous(), order_m, (ends_e, until_e), top_k, rows)
    source_md = source8_nd.view(torch.int8)[order_m // top_k]
    return _transposed(source_md, Runs(ends_e, until_e), rows).view(source8_nd.dtype)


@spread_transposed.register_fake
def _(source8_nd: Tensor, order_m: Tensor, ends_e: Tensor, until_e: Tensor, top_k: int) -> Tensor:  # noqa: ARG001
    return source8_nd.new_empty((source8_nd.shape[1], _padded(order_m.shape[0], ends_e.shape[0])))


@torch.library.custom_op("keepstep::swiglu_backward_fp8", mutates_args=())
def swiglu_backward_fp8(
    gradient_mf: Tensor,
    gate_up_mf: Tensor,
    row_factors: list[Tensor],
    ends_e: Tensor,
    until_e: Tensor,
    transposes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the gates and ups in e5m2, [m, 2f] and [2f, r], the activation [f, r], and the gradient of weights.

    `row_factors` are the weights, and what a row of each of the first three is multiplied by. Without `transposes` the
    second and third are empty.
    """
    rows, runs = _padded(gradient_mf.shape[0], ends_e.shape[0]), Runs(ends_e, until_e)
    if _has_kernels(gate_up_mf):
        from keepstep.models.kernels import experts_fp8

        factors = [factor.contiguous() for factor in row_factors]
        return experts_fp8.swiglu_backward_fp8(gradient_mf.contiguous(), gate_up_mf, factors, runs, rows, transposes)
    weight_m1, straight_m1, left_m1, right_m1 = (factor[:, None] for factor in row_factors)
    gate_mf, up_mf = gate_up_mf.float().chunk(2, dim=1)
    sigmoid_mf, dy_mf = torch.sigmoid(gate_mf), gradient_mf.float()
    silu_mf = gate_mf * sigmoid_mf
    d_weight_m, dy_mf = (dy_mf * silu_mf * up_mf).sum(1), dy_mf * weight_m1
    d_gate_up_mf = torch.cat([dy_mf * up_mf * (sigmoid_mf + silu_mf * (1 - sigmoid_mf)), dy_mf * silu_mf], dim=1)
    columns = d_gate_up_mf * left_m1, silu_mf * up_mf * weight_m1 * right_m1
    parts = [_e5m2(part.bfloat16()) for part in columns]
    kept = [_transposed(part, runs, rows) if transposes else part[:0].t().contiguous() for part in parts]
    return _e5m2(d_gate_up_mf * straight_m1), kept[0], kept[1], d_weight_m


@swiglu_backward_fp8.register_fake
def _(
    gradient_mf: Tensor,
    gate_up_mf: Tensor,
    row_factors: list[Tensor],
    ends_e: Tensor,
    until_e: Tensor,  # noqa: ARG001
    transposes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, f), kept = gradient_mf.shape, _padded(gradient_mf.shape[0], ends_e.shape[0]) * transposes
    shapes = (m, 2 * f), (2 * f, kept), (f, kept)
    straight, transposed, activation = (gate_up_mf.new_empty(shape, dtype=torch.float8_e5m2) for shape in shapes)
    return straight, transposed, activation, torch.empty_like(row_factors[0])


@torch.library.custom_op("keepstep::transposed_weights", mutates_args=())
def transposed_weights(weights_enk: Tensor, undo_e: Tensor) -> Tensor:
    """Weights in e4m3, those of each expert divided by its factor and transposed, [e, k, n]."""
    if _has_kernels(weights_enk):
        from keepstep.models.kernels import experts_fp8

        return experts_fp8.transposed_weights(weights_enk.contiguous(), undo_e)
    highest = torch.finfo(torch.float8_e4m3fn).max
    scaled_enk = (weights_enk.float() / undo_e[:, None, None]).clamp(-highest, highest)
    return scaled_enk.to(torch.float8_e4m3fn).transpose(1, 2).contiguous()


@transposed_weights.register_fake
def _(weights_enk: Tensor, undo_e: Tensor) -> Tensor:  # noqa: ARG001
    experts, height, width = weights_enk.shape
    return weights_enk.new_empty((experts, width, height), dtype=torch.float8_e4m3fn)


def _e5m2(numbers: Tensor) -> Tensor:
    highest = torch.finfo(torch.float8_e5m2).max
    return numbers.clamp(-highest, highest).to(torch.float8_e5m2)


def _transposed(source_md: Tensor, runs: Runs, rows: int) -> Tensor:
    """Rows of one byte's numbers at their places among the r, transposed."""
    counts_e = torch.diff(runs.ends_e, prepend=runs.ends_e.new_zeros(1))
    begins_e = F.pad(runs.until_e[:-1], (1, 0))
    moved_m = (begins_e - runs.ends_e + counts_e).repeat_interleave(counts_e, output_size=source_md.shape[0])
    place_m = moved_m + torch.arange(source_md.shape[0], device=source_md.device)
    padded = source_md.new_zeros((rows, source_md.shape[1]), dtype=torch.int8)
    return padded.index_copy_(0, place_m, source_md.view(torch.int8)).t().contiguous().view(source_md.dtype)


def _has_kernels(tensor: Tensor) -> bool:
    return proven("experts_fp8", tensor, _prove)


def _prove(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    ends_e = torch.tensor([200, 200, 201, 330], dtype=torch.int32)
    runs, order_m = runs_of(ends_e, 330), torch.randperm(330, generator=generator)
    sizes = (330, 96), (330, 192), (165, 200), (4, 160, 96)
    gradient, gate_up, source, weights = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    # Some gradients are past the end of the format, and most are so large that their last digit shows.
    factors = [torch.rand(330, generator=generator) + 0.1 for _ in range(3)] + [torch.full((330,), 3e4)]
    undo_e = torch.tensor([0.004, 0.01, 0.02, 0.03])

    def results(module: Any, where: torch.device) -> list[Tensor]:
        d, g, s, w, u, order, ends, until, *rows = (
            part.to(where)
            for part in (gradient, gate_up, source.to(torch.float8_e4m3fn), weights, undo_e, order_m, *runs, *factors)
        )
        if module is sys.modules[__name__]:
            moved = module.spread_transposed(s, order, ends, until, 2)
            gradients = module.swiglu_backward_fp8(d, g, rows, ends, until, True)
        else:
            padded = _padded(330, 4)
            moved = module.spread_transposed(s, order, (ends, until), 2, padded)
            gradients = module.swiglu_backward_fp8(d, g, rows, (ends, until), padded, transposes=True)
        return [moved, *gradients, module.transposed_weights(w, u)]

    from keepstep.models.kernels import experts_fp8

    return difference(results, experts_fp8, sys.modules[__name__], device)
