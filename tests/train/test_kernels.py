"""What `compute` says about kernels holds while a run computes, and not a moment longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError, HardwareError
from keepstep.core.ranks import from_environment
from keepstep.data.batch import Batch
from keepstep.interop.run_data import open_run_data
from keepstep.models.attention_context import Context
from keepstep.models.mlp import GatedMLP
from keepstep.models.ops.fused_attention import ScoreRule
from keepstep.models.ops.varlen_attention import varlen_attention
from keepstep.models.transformer import Block
from keepstep.parallel.mesh import build_mesh
from keepstep.parallel.world import joined_world
from keepstep.train.bench import bench_step, kernel_kind
from keepstep.train.build import build_learner, spread_model
from keepstep.train.device import chosen_kernels, uses_varlen_attention

TINY = ["model=mpt-tiny", "model.seq_len=32", "global_batch=2", "microbatch=2", "compute.device=cpu"]


def enabled() -> tuple[bool, bool]:
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


def test_the_attention_kernel_is_the_configured_one() -> None:
    config = load_config(None, [*TINY, "compute.attention=math"]).config
    assert enabled() == (True, True)
    with chosen_kernels(config):
        assert enabled() == (False, True)
    assert enabled() == (True, True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "matmul"),
        ("swiglu_gemm_forward", "matmul"),
        ("gelu_gemm_backward", "matmul"),
        ("triton_red_fused_gelu_gelu_backward_sum_view_2", "other"),
        ("qkv_rope_gemm_128", "matmul"),
        ("expert_d_gate_up", "matmul"),
        ("_split_rope_kernel", "other"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("_adamw_kernel", "optimizer"),
    ],
)
def test_breakdown_knows_fused_matmuls(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def test_kernels_of_attention_agree() -> None:
    losses = [
        bench_step(load_config(None, [*TINY, f"compute.attention={name}"]).config, 2, 1, breakdown=False).loss
        for name in ("auto", "math")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What variable-length attention gets: cu_seqlens, the longest document, window and scale, call by call."""
    calls: list[Any] = []

    def attend(*parts: Any) -> torch.Tensor:
        calls.append((parts[3].cu_seqlens.tolist(), parts[3].max_seqlen, *parts[4:]))
        return varlen_attention(*parts)

    monkeypatch.setattr("keepstep.models.attention.varlen_attention", attend)
    return calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu holds the kernel itself against a mask")
def test_packed_documents_reach_the_varlen_kernel(asked: list[Any]) -> None:
    tokens = np.random.default_rng(1).integers(0, 128, (2, 32))
    documents = np.array([[0] * 9 + [1] * 23, [2] * 31 + [3]])
    batch = Batch(tokens, np.roll(tokens, -1, 1), None, documents, 0)
    words = [word for word in TINY if word != "compute.device=cpu"]
    found = []
    for name in ("auto", "flash"):
        config = load_config(
            None, [*words, "model.positions=rotary", "precision=bf16", f"compute.attention={name}"]
        ).config
        with chosen_kernels(config), joined_world(from_environment(), torch.device("cpu")):
            step = build_learner(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu")).step
            found.append([step.run([batch], lr_share=1.0)[0].item() for _ in range(3)])
        assert bool(asked) == (name == "flash")
    assert asked[0] == ([0, 9, 32, 63, 64], 128, 0, None)
    assert found[1] == pytest.approx(found[0], rel=2e-3)


@pytest.mark.parametrize(("lengths", "longest"), [([200, 180, 20], 256), ([100] * 4, 128), ([399, 1], 400)])
def test_varlen_kernel_gets_the_longest_document(lengths: list[int], longest: int) -> None:
    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    batch = Batch(np.zeros((1, 400), np.int64), np.zeros((1, 400), np.int64), None, documents, 0)
    words = [*TINY[:-1], "model.seq_len=400", "precision=bf16", "compute.attention=flash"]
    config = load_config(None, words).config
    with joined_world(from_environment(), torch.device("cpu")):
        step = build_learner(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu")).step
    spans = step._spans(batch)
    assert spans is not None
    assert spans.max_seqlen == longest


@pytest.mark.parametrize(("name", "short", "use_varlen"), [("auto", 16, True), ("auto", 8, False), ("flash", 8, True)])
def test_very_short_documents_get_a_mask(
    name: str, short: int, use_varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.train.build.uses_varlen_attention", lambda *_: True)
    documents = np.arange(512)[None] // short
    batch = Batch(np.zeros((1, 512), np.int64), np.zeros((1, 512), np.int64), None, documents, 0)
    words = [*TINY[:-1], "model.seq_len=512", "precision=bf16", "model.positions=rotary", f"compute.attention={name}"]
    config = load_config(None, words).config
    with joined_world(from_environment(), torch.device("cpu")):
        step = build_learner(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu")).step
    assert (step._spans(batch) is not None) == use_varlen


@pytest.mark.slow
def test_sliding_window_needs_no_mask_with_flash(asked: list[Any]) -> None:
    tokens = np.random.default_rng(2).integers(0, 128, (2, 32))
    batch = Batch(tokens, np.roll(tokens, -1, 1), None, None, 0)
    words = [*TINY[:-1], "model.positions=rotary", "model.sliding_window=5", "precision=bf16"]
    found = []
    for name in ("auto", "flash"):
        config = load_config(None, [*words, f"compute.attention={name}"]).config
        with chosen_kernels(config), joined_world(from_environment(), torch.device("cpu")):
            step = build_learner(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu")).step
            found.append([step.run([batch], lr_share=1.0)[0].item(), step.evaluate(batch)[0].item()])
        assert bool(asked) == (name == "flash")
    assert set(map(str, asked)) == {str(([0, 32, 64], 128, 5, None))}
    assert found[1] == pytest.approx(found[0], rel=2e-3)


@pytest.mark.parametrize("packed", [True, False])
def test_documents_and_windows_use_our_own_operator(
    packed: bool, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "keepstep.train.build.uses_varlen_attention", lambda config, *_: config.compute.attention == "auto"
    )
    monkeypatch.setattr("keepstep.train.build.has_kernel", lambda *_, **__: True)
    rules: list[ScoreRule] = []
    fused_rule = Context.fused_rule
    monkeypatch.setattr(Context, "fused_rule", lambda context: rules.append(fused_rule(context)) or rules[-1])
    tokens = np.random.default_rng(3).integers(0, 128, (2, 128))
    documents = np.repeat([[0, 1, 2], [3, 4, 5]], [50, 70, 8], axis=1) if packed else None
    batch = Batch(tokens, np.roll(tokens, -1, 1), None, documents, 0)
    words = ["model=mpt-tiny", "model.seq_len=128", "model.heads=2", "model.head_dim=64", "model.positions=rotary"]
    words += ["model.layers=2", "model.sliding_window=40", "model.layer_types=[sliding_attention,full_attention]"]
    words += ["model.vocab=128", "global_batch=2", "microbatch=2", "compute.device=cpu", "precision=bf16"]
    found = []
    for name in ("auto", "math"):
        config = load_config(None, [*words, f"compute.attention={name}"]).config
        with chosen_kernels(config), joined_world(from_environment(), torch.device("cpu")):
            step = build_learner(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu")).step
            found.append([step.run([batch], lr_share=1.0)[0].item() for _ in range(2)])
        if name == "auto":
            assert not asked
            assert [(rule.window, rule.first_key_bt is None) for rule in rules[:2]] == [(40, False), (0, not packed)]
    assert found[1] == pytest.approx(found[0], rel=2e-3)


CUDA = torch.device("cuda")
LLAMA = ["model=llama-1b", "global_batch=8", "microbatch=1"]


def kernel_of_an_h100(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_size in range(8, 257, 8)


@pytest.mark.parametrize(
    ("words", "dtype", "use_varlen"),
    [
        ([], torch.bfloat16, True),
        ([], torch.float16, True),
        ([], torch.float32, False),
        (["model.sliding_window=64"], torch.bfloat16, True),
        (["reproducible=elastic"], torch.bfloat16, True),
        (["parallel.tensor=2"], torch.bfloat16, True),
        (["parallel.replicate=2"], torch.bfloat16, True),
        (["parallel.pipeline=2"], torch.bfloat16, False),
        (["parallel.context=2"], torch.bfloat16, False),
        (["model.positions=alibi"], torch.bfloat16, False),
        (["model.head_dim=60"], torch.bfloat16, False),
        (["model.head_dim=264"], torch.bfloat16, False),
        (["compute.attention=math"], torch.bfloat16, False),
        (["compute.attention=cudnn"], torch.bfloat16, False),
        (["compute.attention=flash"], torch.bfloat16, True),
        (["compute.attention=flash", "parallel.pipeline=2"], torch.bfloat16, False),
    ],
)
def test_attention_uses_varlen_where_possible(
    words: list[str], dtype: torch.dtype, use_varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.train.device.flash_supports", kernel_of_an_h100)
    config = load_config(None, [*LLAMA, *words]).config
    assert uses_varlen_attention(config, check_layout(config, 2), CUDA, dtype) == use_varlen
    if config.compute.attention == "auto":
        assert not uses_varlen_attention(config, check_layout(config, 2), torch.device("cpu"), dtype)


@pytest.mark.parametrize(("words", "dtype"), [([], torch.float32), (["model.head_dim=60"], torch.bfloat16)])
def test_unsupported_flash_is_refused_before_training(
    words: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.train.device.flash_supports", kernel_of_an_h100)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    config = load_config(None, [*LLAMA, *words, "compute.attention=flash"]).config
    with pytest.raises(HardwareError, match="is flash, which a GPU cannot compute") as caught:
        uses_varlen_attention(config, check_layout(config, 1), CUDA, dtype)
    assert str(caught.value.hint).startswith("compute.attention=auto")


def test_flash_for_chat_in_a_pipeline_is_refused() -> None:
    words = [*LLAMA, "data.path=toolcalls", "precision=bf16", "compute.attention=flash", "parallel.pipeline=2"]
    with pytest.raises(ConfigError, match="takes no mask, which a row of conversations needs"):
        open_run_data(load_config(None, words).config)


@pytest.mark.parametrize(
    ("words", "fused"),
    [
        ([], True),
        (["compute.recompute=full"], True),
        (["compute.recompute=selective"], False),
        (["compute.fused_matmuls=false"], False),
    ],
)
def test_mlp_uses_fused_matmuls_where_allowed(words: list[str], fused: bool) -> None:
    shape = ["model=llama-1b", "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2"]
    config = load_config(None, [*shape, *TINY[1:], "precision=bf16", *words]).config
    with joined_world(from_environment(), torch.device("cpu")):
        model = spread_model(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu"))[0]
    for block in model.blocks.values():
        assert isinstance(block, Block)
        assert isinstance(block.mlp, GatedMLP)
        assert block.mlp.fuses_residual() == fused
        assert block.attention._fuses_projection() == fused
