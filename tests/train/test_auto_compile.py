"""`compute.compile: auto`: which runs are compiled, by the run and by its plan, and that a run keeps what it had."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from keepstep.config.dump import dump_config
from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.core.ranks import from_environment
from keepstep.models.init import init_weights
from keepstep.parallel.mesh import build_mesh
from keepstep.parallel.world import joined_world
from keepstep.plan.cluster import Machine, cluster_from
from keepstep.plan.search import settled_work
from keepstep.plan.speed import UNCALIBRATED
from keepstep.train import device
from keepstep.train.bench import bench_step
from keepstep.train.build import spread_model
from keepstep.train.device import missing_for_compile, settle_auto
from tests.models.model_variants import VARIANTS, random_tokens
from tests.train.tiny_runs import TINY, run_here

H100 = Machine("NVIDIA H100 80GB HBM3", 79 * 2**30, 989.5e12, "bf16", processes=1, processes_per_node=1)
CPU_MACHINE = replace(H100, device="CPU", precision="fp32")
GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Settle as on one GPU that can compile."""
    monkeypatch.setattr(device, "choose_device", lambda *_: GPU)
    monkeypatch.setattr(device, "missing_for_compile", lambda _: "")
    monkeypatch.setattr(device.dist, "all_reduce", lambda *_: None)
    return monkeypatch


def is_compiled(words: list[str], stored: Path | None = None) -> bool | None:
    config = load_config(None, ["model=mpt-tiny", "microbatch=1", *words]).config
    return settle_auto(config, stored)[0].compute.compile


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        ([], True),
        (["lora.rank=4"], True),
        (["precision=fp8"], True),
        (["compute.compile=false"], False),
        (["model.linear=bitnet"], False),
        (["lora.rank=4", "lora.dropout=0.1", "compute.mlp_chunk_tokens=64"], False),
    ],
)
def test_auto_compiles_what_can_be_on_a_gpu(words: list[str], compiled: bool, gpu: pytest.MonkeyPatch) -> None:
    assert is_compiled(words) is compiled
    gpu.setattr(device, "missing_for_compile", lambda _: "a C compiler")
    assert is_compiled(words) is False


def test_auto_compiles_only_whole_rows(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("WORLD_SIZE", "2")
    assert is_compiled(["parallel.shard=2"]) is True
    assert is_compiled(["parallel.pipeline=2"]) is False


def test_auto_compiles_nothing_on_a_cpu() -> None:
    assert is_compiled(["compute.device=cpu"]) is False


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("before", [True, False])
def test_auto_keeps_what_the_run_had(tmp_path: Path, before: bool) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text(dump_config(load_config(None, ["model=mpt-tiny", f"compute.compile={before}".lower()]).config))
    assert is_compiled([], stored) is before
    assert is_compiled(["model.linear=bitnet"], stored) is False
    # The folder has the run of another model: this is a new one.
    assert is_compiled(["model.layers=3"], stored) is True
    assert is_compiled([f"compute.compile={not before}".lower()], stored) is not before


def test_run_stores_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "max_duration=1ba")
    stored = tmp_path / "run" / "config.yaml"
    assert load_config(stored).config.compute.compile is False
    assert "compute.compile" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
@pytest.mark.parametrize("words", ["", "lora.rank=4 lora.base=fp8 compute.recompute=full"])
def test_blocks_share_their_compiled_code(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large model would compile for minutes, and past torch's limit would not be compiled at all."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    shape = ["model=llama-1b", "model.layers=12", "model.hidden=64", "model.heads=4", "model.kv_heads=2"]
    small = ["model.ffn_hidden=64", "model.vocab=128", "model.seq_len=32", "global_batch=2", "compute.device=cpu"]
    config = load_config(None, [*shape, *small, "precision=fp32", "compute.compile=true", *words.split()]).config
    bench_step(config, steps=1, warmup=1, breakdown=False)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_blocks_of_all_kinds_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two kinds, modes of recomputation, packed rows, validation, other rows: more graphs than torch's 8."""
    gemma = replace(VARIANTS["gemma"], layers=12, layer_types=VARIANTS["gemma"].layer_types * 6)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch._dynamo.reset()
    counters.clear()
    words = [word for word in TINY if not word.startswith("model.")]
    config = replace(load_config(None, [*words, "precision=bf16", "compute.compile=true"]).config, model=gemma)
    with joined_world(from_environment(), torch.device("cpu")):
        mesh = build_mesh(check_layout(config, 1), "cpu")
        model, _, _ = spread_model(config, mesh, torch.device("cpu"), ["full"] * 4 + ["selective"] * 4 + ["none"] * 4)
    init_weights(model.to_empty(device="cpu"), 1)
    for rows in (4, 2):
        tokens_bt = random_tokens(gemma, rows, 24)
        for documents_bt in (None, torch.arange(24).expand(rows, 24) // 7):
            model(tokens_bt, tokens_bt, documents_bt=documents_bt).backward()
            with torch.no_grad():
                model(tokens_bt, tokens_bt, documents_bt=documents_bt)
    assert counters["stats"]["unique_graphs"] > 16
    torch._dynamo.reset()


def test_missing_for_compile_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(device, "has_triton", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    assert missing_for_compile(GPU) == "a C compiler (gcc or clang)"
    config = load_config(None, [*TINY, "compute.compile=false", "compute.device=auto", "precision=bf16"]).config
    assert device.speed_notice(config, GPU).startswith("notice: without a C compiler (gcc or clang) blocks are not")
    monkeypatch.setenv("CC", "cc")
    assert missing_for_compile(GPU) == ""
    monkeypatch.setattr(device, "has_triton", lambda: False)
    assert missing_for_compile(GPU) == "Triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    assert missing_for_compile(GPU).startswith("a GPU")


@pytest.mark.parametrize(
    ("words", "machine", "compiled"),
    [
        ("", H100, True),
        ("compute.compile=false", H100, False),
        ("model.linear=bitnet", H100, False),
        ("parallel.tensor=2", replace(H100, processes=2, processes_per_node=2), False),
        ("", CPU_MACHINE, False),
    ],
)
def test_plan_counts_on_what_the_run_will_choose(words: str, machine: Machine, compiled: bool) -> None:
    config = load_config(None, ["model=mpt-125m", "microbatch=1", *words.split()]).config
    cluster = cluster_from(machine)
    work = settled_work(config, machine.processes, cluster, UNCALIBRATED, machine.precision)
    assert work.compiled is compiled
