"""The matmuls of experts against torch's own operators. Needs a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.grouped_gemm import can_multiply, can_multiply_fp8
from keepstep.models.ops.expert_rows import top_experts
from keepstep.models.ops.routed_experts import routed_experts, sort_by_expert

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="written for Hopper GPUs"
)


def results(
    experts: int, top_k: int, hidden: int, width: int, chosen: Tensor, fused: bool, fp8: bool = False
) -> list[Tensor]:
    """Output and gradients of one layer, in bf16 or fp8 by our kernels or in fp32 one expert at a time."""
    torch.manual_seed(3)
    tokens, dtype = len(chosen), torch.bfloat16 if fused else torch.float32

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = (torch.randn(shape, device="cuda") * scale).bfloat16()
        return drawn.to(dtype).requires_grad_()

    x, weights = draw(tokens, hidden), torch.rand(tokens, top_k, device="cuda").requires_grad_()
    gate_up, down = (
        draw(experts, 2 * width, hidden, scale=hidden**-0.5),
        draw(experts, hidden, width, scale=width**-0.5),
    )
    gradient = draw(tokens, hidden).detach()
    if fused:
        assert (can_multiply_fp8 if fp8 else can_multiply)(x, gate_up.shape)
        routes = sort_by_expert(chosen, chosen.flatten().bincount(minlength=experts))
        out = routed_experts(x, weights, gate_up, down, routes, fp8=fp8)
    else:
        out = torch.zeros_like(x)
        for expert in range(experts):
            token, slot = torch.where(chosen == expert)
            gate, up = (x[token] @ gate_up[expert].t()).chunk(2, dim=1)
            rows = (F.silu(gate) * up) @ down[expert].t() * weights[token, slot, None]
            out = out.index_add(0, token, rows)
    return [out, *torch.autograd.grad(out, (x, weights, gate_up, down), gradient)]


@pytest.mark.parametrize(("fp8", "most"), [(False, 0.02), (True, 0.12)])
@pytest.mark.parametrize(("experts", "hidden", "width"), [(5, 512, 768), (64, 2048, 1024)])
def test_experts_in_their_matmuls(experts: int, hidden: int, width: int, fp8: bool, most: float) -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    chosen = torch.rand(3000, experts, device="cuda", generator=generator).topk(4).indices
    chosen[chosen == 1] = 3  # An expert that gets no row.
    ours, again = (results(experts, 4, hidden, width, chosen, True, fp8) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
    for one, other in zip(ours, results(experts, 4, hidden, width, chosen, False), strict=True):
        assert (one.float() - other).norm() < most * other.norm()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5000, 128, 8), (33, 60, 4), (1, 8, 2), (0, 64, 8)])
def test_the_experts_of_a_token_are_those_of_the_highest_scores(tokens: int, experts: int, top_k: int) -> None:
    scores = torch.rand(tokens, experts, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    assert top_experts(scores, top_k).equal(scores.topk(top_k).indices)
    # Equal scores and numbers that are none: the first ones, and always some that exist.
    scores.zero_()
    assert top_experts(scores, top_k).equal(torch.arange(top_k, device="cuda").expand(tokens, top_k))
    scores.fill_(torch.nan)
    assert top_experts(scores, top_k).equal(torch.arange(top_k, device="cuda").expand(tokens, top_k))
