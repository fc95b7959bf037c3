"""A feed-forward in chunks: the same numbers, one chunk's memory, through recomputation and the compiler too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keepstep.config.load import load_config
from keepstep.config.schema import LoraConfig, ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.block_plan import BlockPlan, RecomputeMode
from keepstep.models.lora import apply_lora, init_adapters
from keepstep.models.mlp import GatedMLP, PlainMLP
from keepstep.models.ops.backend import KernelBackend, use_backend
from keepstep.models.ops.chunked_mlp import share_mlp
from keepstep.models.quantized_weight import quantize_linears
from keepstep.models.transformer import Transformer
from keepstep.parallel.apply import apply_recompute
from keepstep.train.dryrun.fake_gpu import StepTrace
from tests.models.model_variants import FusedOnCpu, random_tokens
from tests.train.tiny_runs import losses, run_here

TOKENS, CHUNK, HIDDEN, WIDE = 48, 20, 32, 64
SHAPE: dict[str, Any] = {
    "layers": 2, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "ffn_hidden": WIDE, "vocab": 61, "seq_len": TOKENS,
    "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "biased swiglu": {"bias": True},
    "geglu": {"activation": "geglu_tanh"},
    "gelu": {"activation": "gelu", "bias": True},
    "gelu by tanh": {"activation": "gelu_tanh"},
    "bitnet": {"linear": "bitnet"},
}
ADAPTERS = LoraConfig(rank=4, targets=("q", "gate", "up", "down"))


def make_model(chunk: int, mode: RecomputeMode = "none", lora: LoraConfig | None = None, **changed: Any) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**{**SHAPE, **changed}))
    if lora is not None:
        if lora.base != "bf16":
            quantize_linears(model.blocks, lora.base)
            for linear in (item for item in model.modules() if hasattr(item, "store")):
                linear.store(torch.randn(linear.shape) / 6)  # type: ignore[operator, arg-type]
        apply_lora(model, lora)
        init_adapters(model, 1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    mlp = model.blocks["0"].mlp
    assert isinstance(mlp, GatedMLP | PlainMLP)
    chunks = share_mlp(mlp, chunk) if chunk else None
    for block in model.blocks.values():
        block.use(BlockPlan(fused_matmuls=mode != "selective", recompute=mode, mlp_chunks=chunks))  # type: ignore[operator]
        apply_recompute(block, mode)
    return model


def loss_and_gradients(model: Transformer, rows: int = 1) -> dict[str, Tensor]:
    targets_bt = random_tokens(model.config, rows, TOKENS, seed=2)
    torch.manual_seed(3)
    loss = model(random_tokens(model.config, rows, TOKENS), targets_bt)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_near(ours: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-5) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert (tensor - expected[name]).norm() <= limit * expected[name].norm(), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_train_like_the_whole_row(kind: str, fused: bool) -> None:
    with use_backend(FusedOnCpu() if fused else KernelBackend()):
        chunked, whole, again = (loss_and_gradients(make_model(size, **KINDS[kind]), 2) for size in (CHUNK, 0, CHUNK))
    assert_near(chunked, whole)
    assert all(torch.equal(tensor, again[name]) for name, tensor in chunked.items())


def test_sums_over_chunks_keep_the_precision_of_one_matmul() -> None:
    torch.manual_seed(4)
    exact = GatedMLP(ModelConfig(**SHAPE)).bfloat16().float()
    x_btd, target_btd = (torch.randn(1, 2048, HIDDEN).bfloat16() for _ in range(2))
    errors = []
    for chunk in (0, 8):
        mlp = GatedMLP(ModelConfig(**SHAPE)).bfloat16()
        mlp.load_state_dict(exact.state_dict())
        mlp.plan = BlockPlan(mlp_chunks=share_mlp(mlp, chunk) if chunk else None)
        (mlp(x_btd) * target_btd).sum().backward()
        (expected,) = torch.autograd.grad((exact(x_btd.float()) * target_btd.float()).sum(), exact.down.weight)
        assert mlp.down.weight.grad is not None
        errors.append(float((mlp.down.weight.grad.float() - expected).norm()))
    assert errors[1] < 1.3 * errors[0]


@pytest.mark.parametrize("base", ["bf16", "nf4", "fp8"])
def test_adapters_train_in_chunks(base: Any) -> None:
    lora = LoraConfig(rank=4, targets=ADAPTERS.targets, base=base)
    chunked, whole = (loss_and_gradients(make_model(size, lora=lora)) for size in (CHUNK, 0))
    assert any("mlp.down.lora_b" in name for name in chunked)
    assert_near(chunked, whole)


def test_frozen_feed_forwards_pass_gradients_on() -> None:
    lora = LoraConfig(rank=4, targets=("q",))
    chunked, whole = (loss_and_gradients(make_model(size, lora=lora)) for size in (CHUNK, 0))
    assert_near(chunked, whole)


def chunked_by_hand(model: Transformer, size: int) -> Transformer:
    """The model with feed-forwards that autograd sees as one for each chunk."""
    for block in model.blocks.values():
        compute = block.mlp.compute  # type: ignore[union-attr]

        def by_hand(x_btd: Tensor, _residual: None = None, compute: Any = compute) -> Tensor:
            return torch.cat([compute(part) for part in x_btd.split(size, dim=1)], dim=1)

        block.mlp.forward = by_hand  # type: ignore[union-attr, method-assign, assignment]
    return model


def test_fp8_scales_are_those_of_a_chunk() -> None:
    chunked, whole = (loss_and_gradients(make_model(size, linear="fp8")) for size in (16, 0))
    assert_near(chunked, loss_and_gradients(chunked_by_hand(make_model(0, linear="fp8"), 16)))
    assert not torch.equal(chunked["loss"], whole["loss"])
    assert_near(chunked, whole, 0.2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_dropout_of_adapters_is_the_same_in_both_passes(mode: RecomputeMode) -> None:
    noisy = LoraConfig(rank=4, targets=ADAPTERS.targets, dropout=0.5)
    chunked = loss_and_gradients(make_model(CHUNK, mode, noisy))
    assert_near(chunked, loss_and_gradients(chunked_by_hand(make_model(0, mode, noisy), CHUNK)))
    quiet = loss_and_gradients(make_model(0, lora=ADAPTERS))
    assert abs(float(chunked["loss"] - quiet["loss"])) > 1e-3


def peak_and_saved(chunk: int, mode: RecomputeMode) -> tuple[float, float]:
    """Bytes at the peak of a step and after forward, in tensors of one hidden state for each token."""
    sizes: dict[str, Any] = {"layers": 1, "ffn_hidden": 16 * HIDDEN, "seq_len": 4096, "vocab": 16}
    model, trace = make_model(chunk, mode, **sizes), StepTrace()
    with trace.following():
        loss = model(*(random_tokens(model.config, 1, 4096, seed) for seed in (1, 2)))
        saved = trace.live_bytes
        loss.backward()
    unit = 4 * 4096 * HIDDEN
    return trace.peak_bytes / unit, saved / unit


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.slow
def test_chunks_hold_the_inner_tensors_of_one(mode: RecomputeMode) -> None:
    (whole_peak, whole_saved), (peak, saved) = (peak_and_saved(chunk, mode) for chunk in (0, 256))
    # A row has 2 × 16 units of gates and ups, 16 of their products, and about as many of gradients.
    assert whole_peak > 80
    assert peak < 30
    assert saved < 16
    assert mode == "full" or whole_saved > saved + 32


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forward += func.name() == "keepstep::mlp_chunks_forward"
        return func(*args, **(kwargs or {}))


def test_recomputation_stops_before_the_feed_forward() -> None:
    model = make_model(CHUNK, "full")
    with _Count() as counted:
        loss_and_gradients(model)
    assert counted.forward == len(model.blocks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "lora", "fp8"])
def test_blocks_compile_once_without_a_break(kind: str, mode: RecomputeMode) -> None:
    changed: dict[str, Any] = {"linear": "fp8"} if kind == "fp8" else KINDS.get(kind, {})
    options: dict[str, Any] = {**changed, "lora": ADAPTERS if kind == "lora" else None, "layers": 3}
    plain, compiled = make_model(16, mode, **options), make_model(16, mode, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in compiled.blocks.values():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    assert_near(loss_and_gradients(compiled), loss_and_gradients(plain))
    # All blocks are one graph; under adapters the input of the first has no gradient.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if kind == "lora" else 1)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["resume", "elastic"])
def test_chunked_runs_resume_bit_by_bit(tmp_path: Path, reproducible: str) -> None:
    words = [f"reproducible={reproducible}", "compute.mlp_chunk_tokens=20", "schedule.name=constant"]
    for steps in (3, 6):
        run_here(tmp_path, *words, "name=stopped", f"max_duration={steps}ba")
    run_here(tmp_path, *words, "name=whole", "max_duration=6ba")
    run_here(tmp_path, *words, "name=unchunked", "max_duration=6ba", "compute.mlp_chunk_tokens=0")
    assert losses(tmp_path, "stopped") == losses(tmp_path, "whole")
    assert losses(tmp_path, "whole") == pytest.approx(losses(tmp_path, "unchunked"), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "reason", "remedy"),
    [
        ("model.experts.count=4", "needs dense blocks", "compute.mlp_chunk_tokens=0"),
        ("parallel.pipeline=2 parallel.schedule=zero_bubble", "zero_bubble runs two", "parallel.schedule=interleaved"),
        ("precision=fp8", "multiple of 16", "compute.mlp_chunk_tokens=16 or 32"),
        ("lora.rank=4 lora.dropout=0.1 compute.compile=true", "repeat its noise", "lora.dropout=0"),
    ],
)
def test_what_chunks_cannot_do_is_refused_by_name(words: str, reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model=llama-1b", "compute.mlp_chunk_tokens=20", *words.split()])
    error, hint = caught.value.lines()
    assert "compute.mlp_chunk_tokens is 20" in error
    assert reason in error
    assert remedy in hint
