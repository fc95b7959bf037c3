"""Adapters on frozen weights in fp8 or NF4: loaded one at a time, resumed bitwise, merged into the originals."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from keepstep.config.hf_config import hf_config_of
from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig
from keepstep.interop.full_model import load_full_model, load_initial_model
from keepstep.interop.hf_folder import load_hf, save_hf
from keepstep.interop.initial_weights import load_pretrained
from keepstep.models.init import init_weights
from keepstep.models.lora import lora_modules, prepare_adapters
from keepstep.models.quantized_weight import QuantizedWeight, weight_slots
from keepstep.models.transformer import Transformer
from tests.doc_blocks import ROOT
from tests.patience import PATIENCE_S
from tests.train.test_finetune import finetune_here
from tests.train.tiny_runs import losses, run_here, run_processes

LORA = ["lora.rank=2", "optimizer.lr=1e-2"]
SHAPE = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, vocab=128, seq_len=16, positions="rotary", norm="rmsnorm",
    activation="swiglu", bias=False, tied=False,
)  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = Transformer(SHAPE)
    init_weights(model, 1)
    save_hf(dict(model.named_parameters()), SHAPE, hf_config_of(SHAPE, "float32"), tmp_path / "hf", torch.float32)
    return tmp_path / "hf"


def prepared(base: str) -> Transformer:
    with torch.device("meta"):
        model = Transformer(SHAPE)
    lora = load_config(None, ["lora.rank=2", f"lora.base={base}"]).config.lora
    prepare_adapters(model, lora, torch.float32)
    return model.to_empty(device="cpu")


@pytest.mark.parametrize(("base", "stops"), [("bf16", True), ("nf4", False)])
def test_recomputation_is_not_stopped_in_a_quantised_matmul(
    base: str, stops: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Exception] = []

    class StoppedError(Exception):
        def __init__(self) -> None:
            stopped.append(self)

    monkeypatch.setattr(torch.utils.checkpoint, "_StopRecomputationError", StoppedError)
    words = [f"finetune.start_from={source}", *LORA, f"lora.base={base}", "compute.recompute=full", "max_duration=1ba"]
    finetune_here(tmp_path, *words)
    assert bool(stopped) == stops


@pytest.mark.parametrize("base", ["fp8", "nf4"])
@pytest.mark.slow
def test_resume_repeats_every_loss_bitwise(base: str, source: Path, tmp_path: Path) -> None:
    words = [f"finetune.start_from={source}", *LORA, f"lora.base={base}", "max_duration=6ba"]
    finetune_here(tmp_path, *words, "name=whole")
    finetune_here(tmp_path, *words, "name=cut", "checkpoint.interval=4ba", "checkpoint.at_end=false")
    finetune_here(tmp_path, *words, "name=cut")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    finetune_here(tmp_path, *words, "lora.base=bf16", "name=plain")
    plain, quantised = losses(tmp_path, "plain"), losses(tmp_path, "whole")
    assert quantised != plain
    assert quantised == pytest.approx(plain, rel=0.02)


def test_weights_are_quantised_one_at_a_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = prepared("nf4"), []
    store = QuantizedWeight.store

    def watched(weight: QuantizedWeight, whole: torch.Tensor) -> None:
        assert not [seen for seen in alive if seen() is not None]
        alive.append(weakref.ref(whole))
        store(weight, whole)

    monkeypatch.setattr(QuantizedWeight, "store", watched)
    load_hf(model, source)
    assert len(alive) == 4 * SHAPE.layers


@pytest.mark.parametrize("base", ["fp8", "nf4"])
@pytest.mark.slow
def test_a_run_and_its_export_give_the_same_codes(base: str, tmp_path: Path) -> None:
    shape = [f"model.{name}={value}" for name, value in vars(SHAPE).items() if name in _SET]
    run_here(tmp_path, *shape, "name=base", "max_duration=2ba")
    whole, _, _ = load_full_model(tmp_path / "base")
    from_run, expected = prepared(base), dict(whole.named_parameters())
    load_pretrained(from_run, tmp_path / "base")
    for name, slot in weight_slots(from_run):
        if isinstance(slot, QuantizedWeight):
            again = QuantizedWeight(slot.kind, *slot.shape, slot.device)
            again.store(expected[name])
            assert torch.equal(slot.codes.view(torch.uint8), again.codes.view(torch.uint8))
        elif not name.endswith(("lora_a", "lora_b")):
            assert torch.equal(slot, expected[name])


_SET = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "positions", "norm", "activation",
    "bias", "tied",
)  # fmt: skip


def test_merging_adds_adapters_to_the_original_weights(source: Path, tmp_path: Path) -> None:
    finetune_here(
        tmp_path, f"finetune.start_from={source}", *LORA, "lora.base=nf4", "name=tuned", "max_duration=3ba"
    )  # fmt: skip
    original = dict(load_initial_model(tmp_path / "tuned")[0].named_parameters())
    adapted = load_full_model(tmp_path / "tuned", merge=False)[0]
    merged = dict(load_full_model(tmp_path / "tuned")[0].named_parameters())
    for name, linear in lora_modules(adapted):
        assert torch.equal(linear.weight, original[f"{name}.weight"])
        assert torch.equal(merged[f"{name}.weight"], linear.merged_weight())
        assert not torch.equal(merged[f"{name}.weight"], original[f"{name}.weight"])


@pytest.mark.slow
def test_two_processes_hold_the_same_base_and_learn_the_same(source: Path, tmp_path: Path) -> None:
    words = [f"finetune.start_from={source}", *LORA, "precision=fp8", "max_duration=3ba"]
    finetune_here(tmp_path, *words, "name=one")
    done = run_processes(tmp_path, 2, *words, "name=two")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-4)


@pytest.mark.slow
def test_benchmark_streams_linked_layers(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["--tiny", "--part", "lora70b", "--steps", "1", "--bases", "nf4", "--out", str(out)]
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "lora_h200.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["lora70b"]["base"] == "nf4"
    assert {"lora70b_tokens_per_s", "lora70b_peak_gib", "lora70b_plan_over_peak"} <= set(result)
