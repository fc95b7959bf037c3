"""Operators that have a kernel on a GPU, in the form that every device runs, against the plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import isnan
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from keepstep.config.schema import ModelConfig
from keepstep.models.attention import Attention
from keepstep.models.block_plan import BlockPlan
from keepstep.models.kernels import cuda, gemm_tiles
from keepstep.models.mlp import GatedMLP, PlainMLP
from keepstep.models.norm import fused_add_norm
from keepstep.models.ops.fused_mlp import gelu_mlp, swiglu_mlp
from keepstep.models.ops.rope import qkv_rope, split_apply_rope
from keepstep.models.positions import apply_rope
from keepstep.models.transformer import Block
from tests.models.model_variants import LLAMA, TINY, build, random_tokens


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

    def fused(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        stream, normed = fused_add_norm(x, None, weight, 1e-5)
        return *fused_add_norm(stream + normed, added, weight, 1e-5), normed

    def plain(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        normed = F.rms_norm(x, (24,), weight, 1e-5)
        stream = x + normed + added
        return stream, F.rms_norm(stream, (24,), weight, 1e-5), normed

    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
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
        return apply_rope(query, cos, sin).flatten(2, 3), apply_rope(key, cos, sin), value

    ours = outputs_and_gradients(lambda qkv: split_apply_rope(qkv, cos, sin, 4, 8), [qkv])
    torch.testing.assert_close(ours, outputs_and_gradients(plain, [qkv]))


def test_deferred_add_changes_no_bit() -> None:
    config = ModelConfig(**LLAMA)
    model, tokens = build(config), random_tokens(config, 2, 24)
    added = model(tokens, tokens)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.use(BlockPlan(deferred_add=True))
    assert torch.equal(model(tokens, tokens), added)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_feed_forward_with_both_its_matmuls(compiled: bool) -> None:
    torch.manual_seed(3)
    x, gate_up, down = torch.randn(2, 5, 24), torch.randn(64, 24), torch.randn(24, 32)

    def fused(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Sequence[torch.Tensor]:
        return (swiglu_mlp(x, gate_up, down, 8),)

    def plain(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Sequence[torch.Tensor]:
        gate, up = F.linear(x, gate_up).unflatten(-1, (-1, 2, 8)).unbind(-2)
        return (F.linear((F.silu(gate) * up).flatten(-2), down),)

    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    ours, theirs = (outputs_and_gradients(one, [x, gate_up, down]) for one in (function, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("by_tanh", "bias"), [(False, True), (True, False)])
def test_the_plain_feed_forward_with_both_its_matmuls(by_tanh: bool, bias: bool, compiled: bool) -> None:
    torch.manual_seed(5)
    up, down = torch.nn.Linear(24, 32, bias), torch.nn.Linear(32, 24, bias)
    x, residual = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    weights = [*up.parameters(), *down.parameters()]

    def fused(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        # A product with a bias takes no residual.
        return gelu_mlp(x, up, down, by_tanh, None if bias else residual) + residual * bias

    def plain(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + down(F.gelu(up(x), approximate="tanh" if by_tanh else "none"))

    def outcome(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
        output = function(*inputs)
        return [output, *torch.autograd.grad(output, [*inputs, *weights], torch.ones_like(output).cumsum(-1))]

    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    torch.testing.assert_close(outcome(function), outcome(plain), rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


class _Matmuls(TorchDispatchMode):
    """Counts matmuls, and operators that stand for one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "keepstep" or func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_full_recomputation_ends_before_the_last_matmul(activation: str) -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    if activation == "swiglu":
        gate_up, down = torch.randn(64, 24, requires_grad=True), torch.randn(24, 32, requires_grad=True)
        function, weights = partial(swiglu_mlp, gate_up_nk=gate_up, down_kf=down, width=8), [gate_up, down]
    else:
        first, last = torch.nn.Linear(24, 32), torch.nn.Linear(32, 24)
        function = partial(gelu_mlp, up=first, down=last, by_tanh=False, residual_btk=None)
        weights = [*first.parameters(), *last.parameters()]
    plain = torch.autograd.grad(function(x).sin().sum(), [x, *weights])
    matmuls = _Matmuls()
    with matmuls:
        # What follows keeps nothing of its own here: its input is the output of the function.
        output = checkpoint(function, x, use_reentrant=False)
        assert matmuls.count == 2
        again = torch.autograd.grad(output.sin().sum(), [x, *weights])
    assert matmuls.count == 2 + 1 + 4
    torch.testing.assert_close(again, plain)


def test_gelu_is_fused_only_between_dense_matmuls() -> None:
    mlp = PlainMLP(ModelConfig(**TINY))
    assert mlp._fuses_gelu()
    mlp.plan = BlockPlan(fused_matmuls=False)
    assert not mlp._fuses_gelu()
    mlp.plan = BlockPlan(tensor_parallel=True)
    assert not mlp._fuses_gelu()
    assert not PlainMLP(ModelConfig(**{**TINY, "linear": "bitnet"}))._fuses_gelu()
    assert not PlainMLP(ModelConfig(**{**TINY, "linear": "fp8"}))._fuses_gelu()


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
            output = swiglu_mlp(x, gate_up, down, 8).sum()
            output = output + sum(part.sum() for part in qkv_rope(x, gate_up, angle.cos(), angle.sin(), 4, 8))
        output.backward()
        assert kept.count((5, 24)) == int(trained)
        assert kept.count((1, 5, 24)) == int(trained)
        assert (gate_up.grad is not None) == trained
        assert x.grad is not None
        assert down.grad is None


def test_swiglu_is_fused_only_between_plain_matmuls() -> None:
    mlp = GatedMLP(ModelConfig(**LLAMA))
    assert mlp.fuses_residual()
    mlp.plan = BlockPlan(fused_matmuls=False)
    assert not mlp.fuses_residual()
    assert not GatedMLP(ModelConfig(**{**LLAMA, "bias": True})).fuses_residual()
    assert not GatedMLP(ModelConfig(**{**LLAMA, "linear": "bitnet"})).fuses_residual()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_projection_with_positions_inside(compiled: bool) -> None:
    torch.manual_seed(4)
    x, weight, angle = torch.randn(2, 7, 24), torch.randn(3 * (4 + 2) * 8, 24), torch.rand(1, 7, 4)
    cos, sin = angle.cos(), angle.sin()

    def fused(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return qkv_rope(x, weight, cos, sin, 4, 8)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return split_apply_rope(F.linear(x, weight), cos, sin, 4, 8)

    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    ours, theirs = (outputs_and_gradients(one, [x, weight]) for one in (function, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


def test_rope_is_fused_only_into_plain_projections() -> None:
    attention = Attention(ModelConfig(**LLAMA), 0)
    assert attention._fuses_projection()
    attention.plan = BlockPlan(fused_matmuls=False)
    assert not attention._fuses_projection()
    for other in ({"bias": True}, {"clip_qkv": 1.0}, {"qk_norm": True}, {"linear": "bitnet"}):
        assert not Attention(ModelConfig(**{**LLAMA, **other}), 0)._fuses_projection()


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

    answers = [cuda.works("gated", torch.device("cuda", 7), prove) for _ in range(2)]
    assert answers == [told is None] * 2
    assert [record.getMessage() for record in caplog.records] == ([] if told is None else [told])


def test_the_difference_of_a_proof_is_the_largest_and_sees_a_nan() -> None:
    one = torch.ones(4)
    assert cuda.relative_difference([one, 3 * one], [one, 2 * one]) == pytest.approx(0.5)
    assert isnan(cuda.relative_difference([one, one / 0 * 0], [one, one]))


def test_matmuls_that_the_kernels_do_not_take() -> None:
    on_the_host = torch.empty(256, 512, dtype=torch.bfloat16)
    assert not gemm_tiles.fits(on_the_host, 1024)
