"""Activation offloading changes no bit, frees what it promises, and leaves nothing behind in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.block_plan import BlockPlan, RecomputeMode
from keepstep.models.transformer import Transformer
from keepstep.parallel import activation_offload
from keepstep.parallel.activation_offload import ActivationOffload, buffer_sizes
from keepstep.parallel.apply import apply_recompute
from keepstep.train.dryrun.fake_gpu import StepTrace
from tests.parallel.test_equality import case
from tests.parallel.worlds import run_world
from tests.train.tiny_runs import losses, run_here

LAYERS, TOKENS, HIDDEN, HEADS = 5, 256, 64, 4
SHAPE: dict[str, Any] = {
    "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": 2, "ffn_hidden": 128, "vocab": 256,
    "seq_len": TOKENS, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False,
}  # fmt: skip
UNIT = 2**16
TENSOR_BYTES = 4 * TOKENS * HIDDEN
"""The residual stream of a row in fp32: one unit of host memory."""


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 2048)


def make_model(
    mode: RecomputeMode, offload: ActivationOffload | None, *, piped: bool = False, layers: int = LAYERS
) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**{**SHAPE, "layers": layers}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    blocks = list(model.blocks.values())
    for block in blocks:
        block.use(BlockPlan(fused_matmuls=mode != "selective", deferred_add=mode == "none", recompute=mode))
        apply_recompute(block, mode, offload=offload)
        if offload is not None:
            offload.wrap(block, is_first=block is blocks[0], stays=block is blocks[-1] and not piped)
    return model


def loss_of(model: Transformer, seed: int = 2) -> Tensor:
    tokens = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return model(tokens[:, :-1], tokens[:, 1:])


def gradients(model: Transformer) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.slow
def test_offloading_changes_no_bit_and_returns_its_memory(mode: RecomputeMode) -> None:
    offload = ActivationOffload()
    plain, offloaded = make_model(mode, None), make_model(mode, offload)
    peaks = set()
    for seed in range(3):
        ours, theirs = loss_of(offloaded, seed), loss_of(plain, seed)
        assert torch.equal(ours, theirs)
        assert offload.buffers.size_bytes > 0
        ours.backward()
        theirs.backward()
        assert offload.buffers.size_bytes == 0
        peaks.add(offload.buffers.peak_bytes)
    assert all(torch.equal(one, other) for one, other in zip(gradients(offloaded), gradients(plain), strict=True))
    assert len(peaks) == 1


def test_full_recomputation_offloads_inputs_and_attention_of_all_blocks_but_the_last() -> None:
    offload = ActivationOffload()
    loss = loss_of(make_model("full", offload))
    # The statistics of attention, one number a head and token, take a unit of their own.
    each = TENSOR_BYTES + TENSOR_BYTES + UNIT
    assert offload.buffers.size_bytes == (LAYERS - 1) * each
    del loss
    assert offload.buffers.size_bytes == 0


def live_after_forward(mode: RecomputeMode, layers: int, *, offloads: bool) -> tuple[int, int]:
    """Bytes on the device that a forward leaves, with the weights that it used, and bytes in host memory."""
    offload = ActivationOffload() if offloads else None
    model, trace = make_model(mode, offload, layers=layers), StepTrace()
    with trace.following():
        loss = loss_of(model)
        live = trace.live_bytes, 0 if offload is None else offload.buffers.size_bytes
        loss.backward()
    return live


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.slow
def test_device_holds_one_block_and_host_memory_the_others_once(mode: RecomputeMode) -> None:
    few, many = (live_after_forward(mode, layers, offloads=True) for layers in (3, 5))
    plain = live_after_forward(mode, 5, offloads=False)[0] - live_after_forward(mode, 3, offloads=False)[0]
    weights = 4 * sum(each.numel() for each in make_model(mode, None).blocks["0"].parameters())
    # Two blocks more on the device are their weights and tensors too small to move.
    left = many[0] - few[0]
    assert left <= 2 * (weights + 8 * 1024)
    # What left the device is in host memory once, in units; weights and rope tables are not among it.
    moved = plain - left
    assert 0.98 * moved <= many[1] - few[1] <= moved + 2 * 20 * UNIT


@pytest.mark.slow
def test_several_passes_before_the_backward_pass_keep_their_own_tensors() -> None:
    plain, offload = make_model("full", None), ActivationOffload()
    piped = make_model("full", offload, piped=True)
    for model in (plain, piped):
        first, second = loss_of(model, 3), loss_of(model, 4)
        first.backward()
        loss_of(model, 5)
        second.backward()
    assert all(torch.equal(one, other) for one, other in zip(gradients(piped), gradients(plain), strict=True))
    assert offload.buffers.size_bytes == 0


def test_evaluation_offloads_nothing() -> None:
    offload = ActivationOffload()
    model = make_model("none", offload)
    with torch.no_grad():
        loss_of(model)
    assert offload.buffers.peak_bytes == 0


def test_host_buffers_are_powers_of_two_without_gaps() -> None:
    for size in (1, UNIT, UNIT + 1, 7 * UNIT, 1792 * 2**20 + 5):
        sizes = buffer_sizes(size)
        assert sizes == sorted(sizes, reverse=True)
        assert all(each & (each - 1) == 0 for each in sizes)
        assert size <= sum(sizes) < size + UNIT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_are_offloaded_as_a_whole() -> None:
    def compiled(offload: ActivationOffload | None) -> Tensor:
        torch._dynamo.reset()
        model = make_model("full", None)
        blocks = list(model.blocks.values())
        for block in blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
            if offload is not None:
                offload.wrap(block, is_first=block is blocks[0], stays=block is blocks[-1])
        loss = loss_of(model)
        if offload is not None:
            assert offload.buffers.size_bytes == (LAYERS - 1) * (2 * TENSOR_BYTES + UNIT)
        loss.backward()
        return torch.cat([each.flatten() for each in gradients(model)])

    assert torch.equal(compiled(ActivationOffload()), compiled(None))


@pytest.mark.slow
def test_every_layout_trains_with_the_same_bits(tmp_path: Path) -> None:
    layouts = {
        "dp2": ("shard=2 microbatch=1", "llama"),
        "dp2 full": ("shard=2 microbatch=1 compute.recompute=full", "deep llama"),
        "tp2 selective": ("tensor=2 compute.recompute=selective", "deep llama"),
        "cp2 full": ("context=2 compute.recompute=full", "window"),
        "pp2": ("pipeline=2 schedule=interleaved", "deep mpt"),
        "ep2 full": ("shard=2 expert=2 compute.recompute=full", "shared"),
        "lora": ("shard=2", "deep lora"),
        "chunked": ("shard=2 compute.recompute=full compute.mlp_chunk_tokens=24", "deep llama"),
    }
    cases = [
        {**case(name, f"{settings} compute.offload_activations={offloads}", model), "name": f"{name} {offloads}"}
        for name, (settings, model) in layouts.items()
        for offloads in ("false", "true")
    ]
    results = run_world(2, [{**each, "steps": 3} for each in cases], tmp_path)
    for name in layouts:
        plain, offloaded = results[f"{name} false"], results[f"{name} true"]
        assert offloaded["numbers"] == plain["numbers"], name
        assert offloaded["valid"] == plain["valid"], name
        peak, left = offloaded["host_bytes"]
        assert peak > 0, name
        assert left == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["resume", "elastic"])
def test_offloaded_runs_resume_with_the_bits_of_a_plain_run(tmp_path: Path, reproducible: str) -> None:
    words = [f"reproducible={reproducible}", "compute.recompute=full"]
    for steps in (3, 6):
        offloaded = ["compute.offload_activations=true", "name=offloaded", f"max_duration={steps}ba"]
        run_here(tmp_path, *words, *offloaded, "schedule.name=constant")
    run_here(tmp_path, *words, "name=plain_constant", "schedule.name=constant")
    assert losses(tmp_path, "offloaded") == losses(tmp_path, "plain_constant")


def test_zero_bubble_refuses_offloading_by_name() -> None:
    words = ["parallel.pipeline=2", "parallel.schedule=zero_bubble", "compute.offload_activations=true"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.layers=4", *words])
    error, hint = caught.value.lines()
    assert "compute.offload_activations is true" in error
    assert "parallel.schedule=interleaved" in hint
