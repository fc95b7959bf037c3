"""Operators that have a kernel on a GPU, in the form that every device runs, against the plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import isnan
from typing import Any

import pytest
import torch
from model_variants import LLAMA, TINY, build, random_tokens
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from keepstep.config.schema import ModelConfig
from keepstep.models.activated import activated
from keepstep.models.attention import Attention
from keepstep.models.gated import gated
from keepstep.models.kernels import cuda, proof, tiles
from keepstep.models.mlp import GatedMLP, PlainMLP
from keepstep.models.positions import rotate
from keepstep.models.residual import joined_add_and_norm
from keepstep.models.turn import project_and_turn, split_and_turn


def outputs_and_gradients(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    inputs = [part.detach().clone().requires_grad_() for part in inputs]
    outputs = function(*inputs)
    torch.manual_seed(9)
    # Strides of their own, as attention's gradients have them.
    seeds = [torch.randn_like(part.transpose(0, 1).contiguous()).transpose(0, 1) for part in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, seeds)]


# Torch's own compiler warns of what it does itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_sum_and_norm(compiled: bool) -> None:
    torch.manual_seed(1)
    x, added, weight = torch.randn(2, 5, 24), torch.randn(2, 5, 24), torch.rand(24)

    def joined(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        stream, normed = joined_add_and_norm(x, None, weight, 1e-5)
        return *joined_add_and_norm(stream + normed, added, weight, 1e-5), normed

    def plain(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        normed = F.rms_norm(x, (24,), weight, 1e-5)
        stream = x + normed + added
        return stream, F.rms_norm(stream, (24,), weight, 1e-5), normed

    function = torch.compile(joined, backend="aot_eager", fullgraph=True) if compiled else joined
    ours, theirs = outputs_and_gradients(function, [x, added, weight]), outputs_and_gradients(plain, [x, added, weight])
    torch.testing.assert_close(ours, theirs)
    torch.compiler.reset()


@pytest.mark.parametrize("tables", [1, 2])
def test_the_split_of_the_projection_with_rotary(tables: int) -> None:
    torch.manual_seed(2)
    qkv, angle = torch.randn(2, 7, 3 * (4 + 2) * 8), torch.rand(tables, 7, 4)
    cos, sin = angle.cos(), angle.sin()

    def plain(qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        grouped = qkv.unflatten(-1, (3, 6, 8))
        query, key, value = grouped[..., :4, :], grouped[..., 4, :], grouped[..., 5, :]
        return rotate(query, cos, sin).flatten(2, 3), rotate(key, cos, sin), value

    ours = outputs_and_gradients(lambda qkv: split_and_turn(qkv, cos, sin, 4, 8), [qkv])
    torch.testing.assert_close(ours, outputs_and_gradients(plain, [qkv]))


def test_a_sum_left_to_the_next_norm_changes_no_bit() -> None:
    config = ModelConfig(**LLAMA)
    model, tokens = build(config), random_tokens(config, 2, 24)
    at_once = model(tokens, tokens)
    for block in model.blocks.values():
        block.hands_over = True  # type: ignore[assignment]
    assert torch.equal(model(tokens, tokens), at_once)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_feed_forward_with_both_its_products(compiled: bool) -> None:
    torch.manual_seed(3)
    x, gate_up, down = torch.randn(2, 5, 24), torch.randn(64, 24), torch.randn(24, 32)

    def joined(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Sequence[torch.Tensor]:
        return (gated(x, gate_up, down, 8),)

    def plain(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Sequence[torch.Tensor]:
        gate, up = F.linear(x, gate_up).unflatten(-1, (-1, 2, 8)).unbind(-2)
        return (F.linear((F.silu(gate) * up).flatten(-2), down),)

    function = torch.compile(joined, backend="aot_eager", fullgraph=True) if compiled else joined
    ours, theirs = (outputs_and_gradients(one, [x, gate_up, down]) for one in (function, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("by_tanh", "bias"), [(False, True), (True, False)])
def test_the_plain_feed_forward_with_both_its_products(by_tanh: bool, bias: bool, compiled: bool) -> None:
    torch.manual_seed(5)
    up, down = torch.nn.Linear(24, 32, bias), torch.nn.Linear(32, 24, bias)
    x, residual = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    weights = [*up.parameters(), *down.parameters()]

    def joined(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        # A product with a bias takes no residual.
        return activated(x, up, down, by_tanh, None if bias else residual) + residual * bias

    def plain(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + down(F.gelu(up(x), approximate="tanh" if by_tanh else "none"))

    def outcome(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
        output = function(*inputs)
        return [output, *torch.autograd.grad(output, [*inputs, *weights], torch.ones_like(output).cumsum(-1))]

    function = torch.compile(joined, backend="aot_eager", fullgraph=True) if compiled else joined
    torch.testing.assert_close(outcome(function), outcome(plain), rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


class _Products(TorchDispatchMode):
    """Counts products of matrices, and operators that stand for one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "keepstep" or func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_full_recomputation_ends_before_the_last_product(activation: str) -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    if activation == "swiglu":
        gate_up, down = torch.randn(64, 24, requires_grad=True), torch.randn(24, 32, requires_grad=True)
        function, weights = partial(gated, gate_up_nk=gate_up, down_kf=down, width=8), [gate_up, down]
    else:
        first, last = torch.nn.Linear(24, 32), torch.nn.Linear(32, 24)
        function = partial(activated, up=first, down=last, by_tanh=False, residual_btk=None)
        weights = [*first.parameters(), *last.parameters()]
    plain = torch.autograd.grad(function(x).sin().sum(), [x, *weights])
    products = _Products()
    with products:
        # What follows keeps nothing of its own here: its input is the output of the function.
        output = checkpoint(function, x, use_reentrant=False)
        assert products.count == 2
        again = torch.autograd.grad(output.sin().sum(), [x, *weights])
    assert products.count == 2 + 1 + 4
    torch.testing.assert_close(again, plain)


def test_which_plain_feed_forwards_are_one_step_of_differentiation() -> None:
    block = build(ModelConfig(**TINY)).blocks["0"]
    mlp = block.mlp
    assert isinstance(mlp, PlainMLP)
    assert mlp._spans_products()
    block.keep_products_apart()  # type: ignore[operator]
    assert not mlp._spans_products()
    assert not PlainMLP(ModelConfig(**{**TINY, "linear": "bitnet"}))._spans_products()
    assert not PlainMLP(ModelConfig(**{**TINY, "linear": "fp8"}))._spans_products()


def test_frozen_weights_get_no_gradient_and_keep_no_input() -> None:
    x, gate_up, down = torch.randn(1, 5, 24, requires_grad=True), torch.randn(48, 24), torch.randn(24, 24)
    angle = torch.rand(1, 5, 4)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    for trained in (False, True):
        gate_up.requires_grad_(trained)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = gated(x, gate_up, down, 8).sum()
            output = output + sum(part.sum() for part in project_and_turn(x, gate_up, angle.cos(), angle.sin(), 4, 8))
        output.backward()
        assert kept.count((5, 24)) == int(trained)
        assert kept.count((1, 5, 24)) == int(trained)
        assert (gate_up.grad is not None) == trained
        assert x.grad is not None
        assert down.grad is None


def test_which_feed_forwards_are_one_step_of_differentiation() -> None:
    block = build(ModelConfig(**LLAMA)).blocks["0"]
    mlp = block.mlp
    assert isinstance(mlp, GatedMLP)
    assert mlp._spans_products()
    block.keep_products_apart()  # type: ignore[operator]
    assert not mlp._spans_products()
    assert not GatedMLP(ModelConfig(**{**LLAMA, "bias": True}))._spans_products()
    assert not GatedMLP(ModelConfig(**{**LLAMA, "linear": "bitnet"}))._spans_products()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_projection_with_positions_inside(compiled: bool) -> None:
    torch.manual_seed(4)
    x, weight, angle = torch.randn(2, 7, 24), torch.randn(3 * (4 + 2) * 8, 24), torch.rand(1, 7, 4)
    cos, sin = angle.cos(), angle.sin()

    def joined(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return project_and_turn(x, weight, cos, sin, 4, 8)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return split_and_turn(F.linear(x, weight), cos, sin, 4, 8)

    function = torch.compile(joined, backend="aot_eager", fullgraph=True) if compiled else joined
    ours, theirs = (outputs_and_gradients(one, [x, weight]) for one in (function, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


def test_which_projections_are_one_step_of_differentiation() -> None:
    block = build(ModelConfig(**LLAMA)).blocks["0"]
    assert block.attention._spans_projection()
    block.keep_products_apart()  # type: ignore[operator]
    assert not block.attention._spans_projection()
    for other in ({"bias": True}, {"clip_qkv": 1.0}, {"qk_norm": True}, {"linear": "bitnet"}):
        assert not Attention(ModelConfig(**{**LLAMA, **other}), 0)._spans_projection()


@pytest.mark.parametrize(
    ("compiler", "difference", "told"),
    [
        ("the compiler takes no program", 0.0, "gated does without its kernels: the compiler takes no program"),
        (None, 0.2, "gated does without its kernels: they are off by 0.2"),
        (None, float("nan"), "gated does without its kernels: they are off by nan"),
        (None, 0.004, None),
    ],
)
def test_kernels_that_fail_their_proof_are_told_of_once_and_done_without(
    compiler: str | None,
    difference: float,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())

    def prove(_device: torch.device) -> float:
        if compiler is not None:
            raise cuda.CudaError(compiler)
        return difference

    answers = [proof.works("gated", torch.device("cuda", 7), prove) for _ in range(2)]
    assert answers == [told is None] * 2
    assert [record.getMessage() for record in caplog.records] == ([] if told is None else [told])


def test_the_difference_of_a_proof_is_the_largest_and_sees_a_nan() -> None:
    one = torch.ones(4)
    assert proof.relative_difference([one, 3 * one], [one, 2 * one]) == pytest.approx(0.5)
    assert isnan(proof.relative_difference([one, one / 0 * 0], [one, one]))


def test_products_that_the_kernels_do_not_take() -> None:
    on_the_host = torch.empty(256, 512, dtype=torch.bfloat16)
    assert not tiles.fits(256, 512, 1024, on_the_host)
