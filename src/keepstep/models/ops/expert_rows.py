"""What happens to rows between the grouped matmuls of experts: copied, summed, activated.

On a GPU each is one pass over memory (`kernels/experts.py`).

Shape legend: n tokens, e experts, k experts of a token, m = n·k rows sorted by expert, d hidden, f width of an expert.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import difference
from keepstep.models.ops.backend import proven

_MOST_EXPERTS = 1024
"""Scores of a token that one program of the kernel looks through."""


@torch.library.custom_op("keepstep::top_experts", mutates_args=())
def top_experts(scores_ne: Tensor, top_k: int) -> Tensor:
    """The numbers of the highest scores of each row, the highest first, int64 [n, k]."""
    small = scores_ne.shape[1] <= _MOST_EXPERTS and scores_ne.dtype == torch.float32
    if small and proven("top_experts", scores_ne, _prove_choice):
        from keepstep.models.kernels import experts

        return experts.top_experts(scores_ne.contiguous(), top_k)
    return scores_ne.topk(top_k, dim=-1).indices


@top_experts.register_fake
def _(scores_ne: Tensor, top_k: int) -> Tensor:
    return scores_ne.new_empty(scores_ne.shape[0], top_k, dtype=torch.int64)


@torch.library.custom_op("keepstep::spread_rows", mutates_args=())
def spread_rows(source_nd: Tensor, place_m: Tensor, copies: int) -> Tensor:
    """Row i at each of the places `place_m[i·copies : (i + 1)·copies]`, which are all rows of the result."""
    if _has_kernels(source_nd):
        from keepstep.models.kernels import experts

        return experts.spread_rows(source_nd.contiguous(), place_m, copies)
    rows_md = source_nd.new_empty(place_m.shape[0], source_nd.shape[1])
    return rows_md.index_copy_(0, place_m, source_nd.repeat_interleave(copies, 0))


@spread_rows.register_fake
def _(source_nd: Tensor, place_m: Tensor, copies: int) -> Tensor:  # noqa: ARG001 - the operator's own signature
    return source_nd.new_empty(place_m.shape[0], source_nd.shape[1])


@torch.library.custom_op("keepstep::sum_rows", mutates_args=())
def sum_rows(source_md: Tensor, place_m: Tensor, copies: int) -> Tensor:
    """Row i is the sum of the rows `place_m[i·copies : (i + 1)·copies]`, in that order, [m / copies, d]."""
    if _has_kernels(source_md):
        from keepstep.models.kernels import experts

        return experts.sum_rows(source_md.contiguous(), place_m, copies)
    each: Tensor = source_md.index_select(0, place_m).unflatten(0, (-1, copies))
    return each.sum(1)


@sum_rows.register_fake
def _(source_md: Tensor, place_m: Tensor, copies: int) -> Tensor:
    return source_md.new_empty(place_m.shape[0] // copies, source_md.shape[1])


@torch.library.custom_op("keepstep::weighted_swiglu", mutates_args=())
def weighted_swiglu(gate_up_mf: Tensor, weight_m: Tensor) -> Tensor:
    """silu(gate) × up × weight of [m, 2f], first the gates."""
    if _has_kernels(gate_up_mf):
        from keepstep.models.kernels import experts

        return experts.weighted_swiglu(gate_up_mf, weight_m)
    gate_mf, up_mf = gate_up_mf.float().chunk(2, dim=1)
    return (F.silu(gate_mf) * up_mf * weight_m[:, None]).to(gate_up_mf.dtype)


@weighted_swiglu.register_fake
def _(gate_up_mf: Tensor, weight_m: Tensor) -> Tensor:  # noqa: ARG001 - the operator's own signature
    return gate_up_mf.new_empty(gate_up_mf.shape[0], gate_up_mf.shape[1] // 2)


@torch.library.custom_op("keepstep::weighted_swiglu_backward", mutates_args=())
def weighted_swiglu_backward(
    gradient_mf: Tensor, gate_up_mf: Tensor, weight_m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the gates and ups, the activation itself, and the gradient of the weights."""
    if _has_kernels(gate_up_mf):
        from keepstep.models.kernels import experts

        return experts.weighted_swiglu_backward(gradient_mf.contiguous(), gate_up_mf, weight_m)
    gate_mf, up_mf = gate_up_mf.float().chunk(2, dim=1)
    sigmoid_mf, scale_m1 = torch.sigmoid(gate_mf), weight_m[:, None]
    product_mf, dy_mf = gate_mf * sigmoid_mf * up_mf, gradient_mf.float() * scale_m1
    d_gate_mf = dy_mf * up_mf * sigmoid_mf * (1 + gate_mf * (1 - sigmoid_mf))
    d_gate_up_mf = torch.cat([d_gate_mf, dy_mf * gate_mf * sigmoid_mf], dim=1).to(gate_up_mf.dtype)
    d_weight_m = (gradient_mf.float() * product_mf).sum(1)
    return d_gate_up_mf, (product_mf * scale_m1).to(gate_up_mf.dtype), d_weight_m


@weighted_swiglu_backward.register_fake
def _(gradient_mf: Tensor, gate_up_mf: Tensor, weight_m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate_up_mf), torch.empty_like(gradient_mf), torch.empty_like(weight_m)


@torch.library.custom_op("keepstep::quantize_rows", mutates_args=())
def quantize_rows(source_md: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3, the largest magnitude of each at the end of its range, and the fp32 factors that undo it [m]."""
    if proven("quantize_rows", source_md, _prove_quantization):
        from keepstep.models.kernels import experts

        return experts.quantize_rows(source_md.contiguous())
    highest = torch.finfo(torch.float8_e4m3fn).max
    undo_m = source_md.float().abs().amax(1).clamp(min=1e-12) / highest
    return (source_md.float() / undo_m[:, None]).clamp(-highest, highest).to(torch.float8_e4m3fn), undo_m


@quantize_rows.register_fake
def _(source_md: Tensor) -> tuple[Tensor, Tensor]:
    small = source_md.new_empty(source_md.shape, dtype=torch.float8_e4m3fn)
    return small, source_md.new_empty(source_md.shape[0], dtype=torch.float32)


def _has_kernels(tensor: Tensor) -> bool:
    return proven("experts", tensor, _prove)


def _prove(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    sizes = (40, 96), (40, 192), (40, 1)
    gradient, gate_up, weight = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    weight, order = weight.flatten().float(), torch.randperm(40, generator=generator)

    def results(module: Any, where: torch.device) -> list[Tensor]:
        d, g, w, o = (tensor.to(where) for tensor in (gradient, gate_up, weight, order))
        backward = module.weighted_swiglu_backward(d, g, w)
        rows = module.spread_rows(g[:10], o, 4), module.sum_rows(g, o, 4)
        return [*rows, module.weighted_swiglu(g, w), *backward]

    return _compare(results, device)


def _prove_choice(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(size, generator=generator) for size in ((40, 128), (3, 60), (700, 64))]
    scores[0][:, :30] = -torch.inf

    def results(module: Any, where: torch.device) -> list[Tensor]:
        return [module.top_experts(each.to(where), 8) for each in scores]

    return _compare(results, device)


def _prove_quantization(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    # fp32: where half-way cases are frequent, the last bit of a scale shows. Short rows and long ones.
    sources = [torch.randn(size, generator=generator) for size in ((40, 96), (3, 40000))]

    def results(module: Any, where: torch.device) -> list[Tensor]:
        pairs = [module.quantize_rows(source.to(where)) for source in sources]
        return [part for pair in pairs for part in pair]

    return _compare(results, device)


def _compare(results: Any, device: torch.device) -> float:
    """How far `results` of the kernels are from those of this module."""
    from keepstep.models.kernels import experts

    return difference(results, experts, sys.modules[__name__], device)
