"""Recomputation frees what it promises, through the compiler and with fused operators too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from keepstep.config.schema import ModelConfig
from keepstep.models.attention_context import Context
from keepstep.models.block_plan import BlockPlan, RecomputeMode
from keepstep.models.ops.backend import KernelBackend, use_backend
from keepstep.models.positions import rope_tables
from keepstep.models.transformer import Block
from keepstep.parallel.apply import apply_recompute
from tests.models.model_variants import FusedOnCpu

TOKENS, HIDDEN = 256, 128
SHAPE: dict[str, Any] = {"layers": 1, "hidden": HIDDEN, "heads": 2, "vocab": 256, "seq_len": TOKENS}
LLAMA: dict[str, Any] = {
    **SHAPE, "kv_heads": 1, "ffn_hidden": 256, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
    "bias": False,
}  # fmt: skip
GPT: dict[str, Any] = {**SHAPE, "positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
LSE_WIDTH = SHAPE["heads"]
KEPT_BY_FULL = 2 * HIDDEN + LSE_WIDTH
"""Numbers a token: the block's output, and what attention returns: its output and one statistic a head."""


def make_block(shape: dict[str, Any], mode: RecomputeMode, fused: bool) -> Block:
    torch.manual_seed(1)
    block = Block(ModelConfig(**shape), 0).bfloat16()
    plan = BlockPlan(
        fused_matmuls=fused and mode != "selective",
        fused_attention=fused and block.attention.can_fuse_attention(),
        deferred_add=mode == "none",
        recompute=mode,
    )
    block.use(plan)
    apply_recompute(block, mode)
    return block


def saved_numbers(shape: dict[str, Any], mode: RecomputeMode, fused: bool) -> int:
    """Numbers a token that a compiled block keeps for its backward pass, parameters and inputs left out."""
    kept: list[int] = []

    def forward_graph(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        tensors = [node for node in outputs if node is not None and not node.name.startswith("primals")]
        kept.append(sum(node.meta["val"].numel() for node in tensors if isinstance(node.meta["val"], Tensor)))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward_graph, bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    torch._dynamo.reset()
    block = make_block(shape, mode, fused)
    run_block(torch.compile(block.forward, backend=backend), block, shape, fused)
    return kept[0] // TOKENS


def run_block(forward: Callable[..., Any], block: Block, shape: dict[str, Any], fused: bool) -> list[Tensor]:
    torch.manual_seed(2)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    rotary = rope_tables(ModelConfig(**shape), torch.arange(TOKENS)[None]) if shape["positions"] == "rotary" else None
    with use_backend(FusedOnCpu() if fused else KernelBackend()):
        stream, added = forward(x, Context(None, True, rotary, None), None)
        output = stream if added is None else stream + added
        gradients = torch.autograd.grad(output.float().square().sum(), [x, *block.parameters()])
    return [output, *gradients]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "shape",
    [LLAMA, GPT, {**LLAMA, "linear": "fp8"}, {**LLAMA, "qk_norm": True}],
    ids=["llama", "gpt", "fp8", "qk_norm"],
)
@pytest.mark.slow
def test_compiled_full_recomputation_keeps_input_and_attention_only(shape: dict[str, Any], fused: bool) -> None:
    none, full = (saved_numbers(shape, mode, fused) for mode in ("none", "full"))
    assert full <= KEPT_BY_FULL + 8
    assert full < 0.5 * none


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_selective_recomputation_keeps_matmul_outputs() -> None:
    none, selective, full = (saved_numbers(LLAMA, mode, True) for mode in ("none", "selective", "full"))
    assert full < selective < none


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [LLAMA, GPT, {**LLAMA, "qk_norm": True}], ids=["llama", "gpt", "qwen3"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_bit(shape: dict[str, Any], fused: bool, mode: RecomputeMode) -> None:
    plain = make_block(shape, "none", fused)
    # The same operators, so that bits can be equal.
    plain.use(BlockPlan(fused_matmuls=fused and mode != "selective", fused_attention=fused))
    block = make_block(shape, mode, fused)
    for one, other in zip(
        run_block(block.forward, block, shape, fused), run_block(plain.forward, plain, shape, fused), strict=True
    ):
        assert torch.equal(one, other)


def test_full_recomputation_does_not_attend_twice() -> None:
    calls: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.name())
            return func(*args, **(kwargs or {}))

    block = make_block(LLAMA, "full", True)
    with Watch():
        run_block(block.forward, block, LLAMA, True)
    assert calls.count("keepstep::attention_forward") == 1
    assert calls.count("keepstep::qkv_rope_forward") == 2
