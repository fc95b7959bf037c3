"""Muon's kernels against torch's own operators. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from keepstep.models.ops.backend import backend
from keepstep.train.optim.master_weights import join, split
from keepstep.train.optim.newton_schulz import orthogonalise, symmetric

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels run on a GPU")
CUDA = torch.device("cuda")


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def test_kernels_prove_themselves() -> None:
    assert backend().has_muon(torch.empty(1, device=CUDA))


@pytest.mark.parametrize("tall", [False, True])
def test_symmetric_matmul_is_the_whole_one(tall: bool) -> None:
    x = torch.randn(3, 1024, 1920, device=CUDA, dtype=torch.bfloat16)
    side = x.mT.contiguous().mT if tall else x
    gram = symmetric(side, side)
    assert relative(gram, x.double() @ x.double().mT) < 0.003
    assert torch.equal(gram, gram.mT)
    assert torch.equal(symmetric(side[1:2], side[1:2])[0], gram[1])
    gram = gram / gram.float().norm()
    ours, exact = symmetric(gram, gram, gram, 2.0, -4.0, 3.0), gram.double()
    assert relative(ours, 2 * exact @ exact - 4 * exact + 3 * torch.eye(1024, device=CUDA)) < 0.003


@pytest.mark.parametrize("shape", [(2, 1024, 4096), (2, 4096, 1024), (2, 1024, 1536), (4, 200, 300)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, device=CUDA)
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.4
    assert values.max() < 1.3
    low = torch.randn(*shape[:2], 8, device=CUDA) @ torch.randn(shape[0], 8, shape[2], device=CUDA)
    values = torch.linalg.svdvals(orthogonalise(low + 1e-3 * torch.randn_like(low)))
    assert values.max() < 1.3


@pytest.mark.parametrize("factor", [0.5, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_momentum_and_update_are_the_plain_ones(factor: float, dtype: torch.dtype) -> None:
    from keepstep.models.kernels.muon import apply_, momentum_

    scale = torch.tensor(factor, device=CUDA)
    gradient = torch.randn(100_001, device=CUDA).to(dtype)
    gradient[7] = float("inf")
    momentum, weight = torch.randn(100_001, device=CUDA), torch.randn(100_001, device=CUDA)
    counts = torch.isfinite(scale).float()
    scaled = torch.nan_to_num(gradient.float() * scale, nan=0.0, posinf=0.0, neginf=0.0)
    expected = momentum + (scaled - momentum) * (0.05 * counts)
    direction = torch.empty(100_001, device=CUDA, dtype=torch.bfloat16)
    momentum_(gradient, momentum, direction, scale, 0.95)
    torch.testing.assert_close(momentum, expected)
    torch.testing.assert_close(direction.float(), scaled.lerp(expected, 0.95), rtol=0.01, atol=1e-6)
    high, low = split(weight)
    apply_((high, low), direction, scale, 0.99, -0.02)
    moved = weight * 0.99 - direction.float() * 0.02 if counts else weight
    torch.testing.assert_close(join(high, low), moved, rtol=1e-5, atol=1e-6)
