"""Every kernel against torch's own operators, at sizes like those of a training step. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from keepstep.models.fp8 import Fp8Linear, fp8_gated
from keepstep.models.head import head_loss
from keepstep.models.swiglu import activate, activate_backward, swiglu
from keepstep.train.master import bias_corrections, join, plain_update, split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels run on a GPU")
CUDA = torch.device("cuda")


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 300, 64, device=CUDA, dtype=dtype, requires_grad=True)
    weight = (torch.randn(50304, 64, device=CUDA) * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(0, 50257, (2, 300), device=CUDA)
    targets[0, :7] = -100
    reference = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    expected = F.cross_entropy(
        (reference[0] @ reference[1].t())[..., :50257].flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected.backward()
    for chunks in (1, 3):
        loss = head_loss(hidden, weight, targets, 50257, chunks)
        loss.backward()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        for ours, theirs in zip((hidden, weight), reference, strict=True):
            assert relative(ours.grad, theirs.grad) < tolerance
            ours.grad = None
        with torch.no_grad():
            assert head_loss(hidden, weight, targets, 50257, chunks).item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("rows", [7, 32768])
def test_swiglu_forward_backward_and_largest_magnitude(rows: int) -> None:
    torch.manual_seed(2)
    fused = torch.randn(rows, 16384, device=CUDA, dtype=torch.bfloat16)
    dy = torch.randn(rows, 8192, device=CUDA, dtype=torch.bfloat16)
    gate, up = fused.float().unflatten(-1, (-1, 2, 1024)).unbind(-2)
    product, largest = activate(fused, 1024, with_largest=True)
    expected = (F.silu(gate) * up).flatten(-2)
    assert relative(product, expected) < 4e-3
    assert largest.item() == pytest.approx(expected.abs().max().item(), rel=1e-5)
    del gate, up, product, expected
    gradient, largest = activate_backward(dy, fused, 1024, with_largest=True)
    reference = activate_backward(dy[:64].cpu(), fused[:64].cpu(), 1024)[0]
    assert relative(gradient[:64].cpu(), reference) < 4e-3
    assert largest.item() == pytest.approx(gradient.abs().max().item(), rel=1e-2)


def test_the_gated_fp8_form_at_full_size() -> None:
    torch.manual_seed(3)
    with CUDA:
        gate_up, down = Fp8Linear(2048, 16384, False).bfloat16(), Fp8Linear(8192, 2048, False).bfloat16()
    x = torch.randn(4, 4096, 2048, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 4096, 2048, device=CUDA, dtype=torch.bfloat16)

    def gradients(output: torch.Tensor) -> list[torch.Tensor]:
        return [output.detach(), *torch.autograd.grad(output, [x, gate_up.weight, down.weight], dy)]

    ours = gradients(fp8_gated(x, gate_up, down, 1024))
    apart = gradients(down(swiglu(gate_up(x), 1024)))
    dense = gradients(F.linear(swiglu(F.linear(x, gate_up.weight), 1024), down.weight))
    # Scales that differ in the last bit round differently: what counts is that neither form is further from the truth.
    for fused, plain, exact in zip(ours, apart, dense, strict=True):
        assert relative(fused, exact) < 0.12
        assert relative(fused, exact) < 1.1 * relative(plain, exact)


def test_adamw_on_split_weights() -> None:
    torch.manual_seed(4)
    size = 1_000_003
    whole = torch.randn(size, device=CUDA)
    start = [*split(whole), torch.randn(size, device=CUDA), torch.rand(size, device=CUDA)]
    gradient, factor = torch.randn(size, device=CUDA, dtype=torch.bfloat16), torch.tensor(0.7, device=CUDA)
    corrections = bias_corrections(torch.tensor(3.0, device=CUDA), (0.9, 0.95))
    settings = {"lr": 0.1, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "corrections": corrections}
    from keepstep.models.kernels.adamw import adamw_

    ours, theirs = ([part.clone() for part in start] for _ in range(2))
    adamw_((ours[0], ours[1]), gradient, (ours[2], ours[3]), factor, **settings)  # type: ignore[arg-type]
    plain_update((theirs[0], theirs[1]), gradient, (theirs[2], theirs[3]), factor, settings)
    assert torch.equal(join(start[0], start[1]), whole)
    torch.testing.assert_close(join(ours[0], ours[1]), join(theirs[0], theirs[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-5, atol=1e-5)
    # A factor that is not a number: nothing may change.
    before = [part.clone() for part in ours]
    adamw_((ours[0], ours[1]), gradient, (ours[2], ours[3]), factor * float("nan"), **settings)  # type: ignore[arg-type]
    assert all(torch.equal(part, kept) for part, kept in zip(ours, before, strict=True))
