"""Runs with experts: resumed bit by bit, at any number of processes, with the routers' biases in the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keepstep.interop.full_model import load_full_model
from keepstep.models.moe import router_biases
from tests.train.tiny_runs import losses, metrics, run_here
from tests.train.tiny_worlds import run_world

pytestmark = pytest.mark.slow

EXPERTS = [
    "model.norm=rmsnorm", "model.positions=rotary", "model.activation=swiglu", "model.bias=false",
    "model.experts.count=4", "model.experts.ffn_hidden=16", "model.experts.scores=sigmoid",
    "model.experts.aux_loss=0.1", "model.experts.z_loss=0.01", "model.experts.balance_bias=true",
    "model.experts.bias_update_rate=0.05", "schedule.name=constant", "model.experts.bias=true",
    "model.experts.swiglu_limit=7.0", "model.attention_sinks=true", "model.out_bias=true",
]  # fmt: skip
LATENT = [
    *EXPERTS[:-2], "model.kv_lora_rank=16", "model.head_dim=12", "model.qk_rope_head_dim=4", "model.v_head_dim=8",
    "model.q_lora_rank=8",
]  # fmt: skip


def numbers(root: Path, name: str) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in metrics(root, name) if "loss" in line]


@pytest.mark.parametrize("words", [EXPERTS, LATENT], ids=["sinks", "latent attention"])
def test_resume_has_the_bits_and_biases_of_a_whole_run(tmp_path: Path, words: list[str]) -> None:
    run_here(tmp_path, *words, "name=whole", "max_duration=8ba")
    for steps in (4, 8):
        run_here(tmp_path, *words, "name=cut", f"max_duration={steps}ba")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    whole, cut = (router_biases(load_full_model(tmp_path / name)[0]) for name in ("whole", "cut"))
    assert len(whole) == 2
    assert all(torch.equal(bias, cut[name]) for name, bias in whole.items())
    assert any(bias.any() for bias in whole.values())


def test_finetuning_starts_with_the_biases_of_its_base(tmp_path: Path) -> None:
    run_here(tmp_path, *EXPERTS, "name=run", "max_duration=4ba")
    trained = router_biases(load_full_model(tmp_path / "run")[0])
    words = [f"finetune.start_from={tmp_path}/run", "max_duration=1ba", "model.experts.bias_update_rate=0"]
    run_here(tmp_path, *EXPERTS, *words, "name=next")
    started = router_biases(load_full_model(tmp_path / "next")[0])
    assert any(bias.any() for bias in trained.values())
    assert all(torch.equal(bias, started[name]) for name, bias in trained.items())


def test_adapters_on_attention_resume_and_leave_experts_and_biases_alone(tmp_path: Path) -> None:
    run_here(tmp_path, *EXPERTS, "name=base", "max_duration=3ba")
    words = [*EXPERTS, f"finetune.start_from={tmp_path}/base", "lora.rank=4", "lora.targets=[q, v, o]"]
    run_here(tmp_path, *words, "name=whole", "max_duration=4ba")
    for steps in (2, 4):
        run_here(tmp_path, *words, "name=cut", f"max_duration={steps}ba")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    base, tuned = (load_full_model(tmp_path / name)[0].state_dict() for name in ("base", "whole"))
    changed = {name.split(".", 2)[2] for name, tensor in base.items() if not torch.equal(tensor, tuned[name])}
    assert changed == {"attention.qkv.weight", "attention.out.weight"}


def test_elastic_runs_with_experts_are_equal_at_any_world_size(tmp_path: Path) -> None:
    words = ["precision=bf16", "compute.recompute=full", "optimizer=muon"]
    words = [*EXPERTS, *words, "reproducible=elastic", "global_batch=10", "microbatch=2", "model.dropout=0.1"]
    run_here(tmp_path, *words, "name=steady", "max_duration=10ba")
    for stage, processes in enumerate((2, 1, 4, 3, 2), start=1):
        codes = run_world(tmp_path, processes, *words, "name=moving", f"max_duration={2 * stage}ba")
        assert codes == [0] * processes, (tmp_path / "said_0.txt").read_text()
    assert numbers(tmp_path, "moving") == numbers(tmp_path, "steady")
    assert len(numbers(tmp_path, "moving")) == 10
    whole, cut = (router_biases(load_full_model(tmp_path / name)[0]) for name in ("steady", "moving"))
    assert all(torch.equal(bias, cut[name]) for name, bias in whole.items())
