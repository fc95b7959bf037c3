"""`compute.recompute: auto`: the least recomputation that fits, by the plan's own memory model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from keepstep.cli.main import main
from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.plan.cluster import Machine
from keepstep.plan.memory import plan_memory
from keepstep.plan.search import MARGIN, recompute_modes
from keepstep.plan.workload import Recompute, Workload, workload_of
from keepstep.train import device

GIB = 2**30
H200 = Machine("NVIDIA H200", int(139.8 * GIB), 989.5e12, "bf16", processes=1, processes_per_node=1)
LLAMA_1B = "model=llama-1b model.seq_len=4096 microbatch=8 global_batch=8"
LORA_8B = "model=llama-8b lora.rank=16 model.seq_len=4096 microbatch=4 global_batch=4"


def modes(words: str, machine: Machine = H200) -> tuple[Recompute, ...]:
    return recompute_modes(load_config(None, [*words.split(), "compute.recompute=auto"]).config, machine)


def work(words: str, machine: Machine = H200) -> Workload:
    return workload_of(load_config(None, words.split()).config, machine.processes, "bf16", machine.memory_bytes)


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        (f"{LLAMA_1B} compute.recompute=none", 59.6),
        (f"{LORA_8B} compute.recompute=none", 88.0),
    ],
)
def test_memory_agrees_with_peaks_measured_on_h200(words: str, gib: float) -> None:
    assert plan_memory(work(words)).allocated / GIB == pytest.approx(gib, rel=0.05)


def test_memory_of_full_is_at_most_half_of_none() -> None:
    none, full = (plan_memory(work(f"{LLAMA_1B} compute.recompute={mode}")).allocated for mode in ("none", "full"))
    assert full <= 0.5 * none


def test_auto_recomputes_nothing_for_lora_that_fits() -> None:
    assert set(modes(LORA_8B)) == {"none"}
    # All of the 8 billion parameters trained would not fit without recomputation: frozen ones need 2 bytes, not 16.
    assert set(modes(LORA_8B.replace("lora.rank=16", ""))) != {"none"}


def test_auto_recomputes_nothing_where_everything_fits() -> None:
    assert set(modes(LLAMA_1B)) == {"none"}


def test_auto_fits_131072_tokens_of_llama_1b_on_one_h200() -> None:
    words = "model=llama-1b model.seq_len=131072 microbatch=1 global_batch=1 compute.compile=true"
    chosen = modes(words)
    assert len(chosen) == 16
    assert plan_memory(replace(work(words), recompute_by_block=chosen)).needed <= (1 - MARGIN) * H200.memory_bytes
    # And no block more could do without: the margin is not wasted.
    least: tuple[Recompute, ...] = ("none",) * 16
    assert plan_memory(replace(work(words), recompute_by_block=least)).needed > H200.memory_bytes


def test_auto_uses_what_memory_there_is() -> None:
    words = "model=llama-8b model.seq_len=4096 microbatch=4 global_batch=4"
    small, large = (
        sum(mode != "full" for mode in modes(words, replace(H200, memory_bytes=int(size * GIB)))) for size in (125, 150)
    )
    assert small < large


def test_auto_chooses_full_where_nothing_fits() -> None:
    words = "model=llama-8b model.seq_len=4096 microbatch=4 global_batch=4"
    assert set(modes(words, replace(H200, memory_bytes=24 * GIB))) == {"full"}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_auto_respects_the_schedule(schedule: str) -> None:
    words = "model=llama-1b microbatch=8 model.seq_len=2048 global_batch=64 parallel.pipeline=2"
    machine = replace(H200, memory_bytes=30 * GIB, processes=2, processes_per_node=2)
    chosen = modes(f"{words} parallel.schedule={schedule}", machine)
    assert ("selective" in chosen) <= (schedule == "1f1b")
    assert set(chosen) != {"none"}


def test_build_recomputes_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=H200.memory_bytes))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: H200.device)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    words = "model=llama-1b model.seq_len=131072 microbatch=1 global_batch=1 compute.recompute=auto"
    config = load_config(None, words.split()).config
    chosen = device.recompute_modes(config, check_layout(config, 1), torch.device("cuda", 0))
    assert tuple(chosen) == modes(words)


def test_plan_shows_the_mixture_that_the_run_uses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama-1b", "model.seq_len=131072", "microbatch=1", "global_batch=1", "compute.recompute=auto"]
    assert main(["plan", *words, "--cluster", "h200:1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["recompute"]
    counts = Counter(modes(" ".join(words)))
    assert shown == ", ".join(
        f"{mode} for {count}{' blocks' if number == 0 else ''}" for number, (mode, count) in enumerate(counts.items())
    )
