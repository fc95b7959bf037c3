"""Experts with biases and clipped SwiGLU, by plain differentiable operators: our own kernels compute neither.

Shape legend: n tokens, k experts of a token, m = n·k rows sorted by expert, d hidden, e experts, f width of an expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.ops.backend import backend
from keepstep.models.ops.grouped_matmul import grouped_matmul
from keepstep.models.ops.routed_experts import Routes

_GATE_SLOPE = 1.702
"""With it x · sigmoid(x · slope) is close to GELU; the one of gpt-oss."""


class ExpertWeights(NamedTuple):
    """The weights of all experts of a layer; biases may be missing."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def biased_experts(x_nd: Tensor, weights_nk: Tensor, weights: ExpertWeights, limit: float, routes: Routes) -> Tensor:
    """The weighted sum of the outputs of each token's experts, [n, d]; `limit` clips SwiGLU, 0 does not."""
    order_m, place_m, ends_e = routes
    top_k, has_kernel = weights_nk.shape[1], backend().has_grouped_matmul(x_nd)
    x_md = _Permute.apply(x_nd, order_m, place_m, top_k)  # type: ignore[no-untyped-call]
    gate_up_mf = grouped_matmul(x_md, weights.gate_up.to(x_nd.dtype), ends_e, has_kernel=has_kernel)
    inner_mf = _glu(_add_bias(gate_up_mf, weights.gate_up_bias, ends_e), limit)
    out_md = grouped_matmul(inner_mf, weights.down.to(x_nd.dtype), ends_e, has_kernel=has_kernel)
    out_md = _Permute.apply(_add_bias(out_md, weights.down_bias, ends_e), place_m, order_m, 1)  # type: ignore[no-untyped-call]
    out_nkd = out_md.unflatten(0, (-1, top_k))
    out_nd: Tensor = (out_nkd * weights_nk.to(out_nkd.dtype)[..., None]).sum(1)
    return out_nd


def _glu(gate_up_mf: Tensor, limit: float) -> Tensor:
    gate_mf, up_mf = gate_up_mf.chunk(2, dim=-1)
    if not limit:
        return F.silu(gate_mf) * up_mf
    gate_mf, up_mf = gate_mf.clamp(max=limit), up_mf.clamp(-limit, limit)
    return (up_mf + 1) * gate_mf * torch.sigmoid(_GATE_SLOPE * gate_mf)


def _add_bias(x_mf: Tensor, bias_ef: Tensor | None, ends_e: Tensor) -> Tensor:
    """Each row plus the bias of its expert: a matmul with ones, whose gradient adds rows up without atomics."""
    if bias_ef is None:
        return x_mf
    row_m1 = torch.arange(x_mf.shape[0], device=x_mf.device)[:, None]
    begins_e = F.pad(ends_e[:-1], (1, 0))
    of_expert_me = ((row_m1 >= begins_e) & (row_m1 < ends_e)).to(x_mf.dtype)
    return torch.addmm(x_mf, of_expert_me, bias_ef.to(x_mf.dtype))


class _Permute(torch.autograd.Function):
    """Rows in another order, each `copies` times; the gradient adds the copies up in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_m: Tensor, place_m: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(place_m)
        return x.index_select(0, order_m // copies if copies > 1 else order_m)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (place_m,) = ctx.saved_tensors
        gradient = gradients[0].index_select(0, place_m)
        if ctx.copies > 1:
            gradient = gradient.unflatten(0, (-1, ctx.copies)).sum(1)
        return gradient, None, None, None
