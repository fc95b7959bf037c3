"""The figures of docs/performance.md are those of the results, and the benchmark has a part for every preset."""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import h200_page
from keepstep.config.load import load_config
from keepstep.plan.cluster import GIB
from keepstep.plan.memory import plan_memory
from keepstep.plan.workload import workload_of
from tests.doc_blocks import ROOT

STEP = {
    "model": "mpt-125m", "parameters": 125311488, "seq_len": 2048, "global_batch": 64, "precision": "fp8",
    "tokens_per_s": 1234567.0, "mfu": 0.4321, "peak_memory_gib": 12.3, "step_s": 0.25,
    "breakdown": {"matmul": 0.1, "other": 0.04, "attention": 0.02, "copies": 0.01},
}  # fmt: skip


def test_page_shows_the_results() -> None:
    before, _, rest = h200_page.PAGE.read_text().partition(h200_page.MARKERS[0])
    shown = rest.partition(h200_page.MARKERS[1])[0].strip()
    assert shown == h200_page.render(*h200_page.read_results()), "run PYTHONPATH=src python benchmarks/h200_page.py"
    assert "| tokens/s |" not in before


def test_a_measured_step_becomes_a_line_and_is_no_longer_missing() -> None:
    line = "| **mpt-125m** | 64 of 2048 | fp8 | 1,234,567 | 43.2% | 12 GiB | 250.0 ms | 100.0 | 20.0 | 0.0 | 50.0 |"
    assert line in h200_page.render({"mpt125m_fp8": STEP}, {}).splitlines()
    assert "mpt-125m (bf16)" in h200_page.unmeasured({"mpt125m_fp8": STEP}, {})
    # A shorter model of the same name is not the preset.
    part = {**STEP, "parameters": 60_000_000}
    assert "mpt-125m (bf16, fp8)" in h200_page.unmeasured({"mpt125m_fp8": part}, {})


def test_adapters_are_reported_once_measured() -> None:
    large = {"base": "fp8", "tokens_per_s": 2345.6, "memory_gib": 100.26, "plan_gib": 99.04}
    reported = h200_page.sentences({"lora70b": large})
    assert reported == ["- llama-70b, LoRA on an fp8 base: 2,346 tokens/s, 100.3 GiB at the peak, planned 99.0."]
    losses = {f"loss8b_{base}": {"last_20_loss": loss} for base, loss in (("bf16", 4.0), ("fp8", 4.01))}
    (reported,) = h200_page.sentences({**losses, "lora8b_fp8_loss_relative": 0.0025})
    assert reported == "- llama-8b, LoRA after 200 real steps: loss 4.0000 on a bf16 base, 4.0100 on an fp8 base."


def test_every_dense_preset_that_fits_is_a_part_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "h200.py"))
    shapes = [*benchmark["PRESETS"].values(), *(benchmark[f"LLAMA_{size}"] for size in ("1B", "3B", "8B"))]
    configs = [load_config(None, words).config for words in shapes]
    missing = {name.partition(" ")[0] for name in h200_page.unmeasured({}, {})}
    assert missing - {config.model.preset for config in configs} == {"olmoe-1b-7b"}  # moe.py measures it
    for config in configs:
        mode = "full" if config.compute.recompute == "auto" else config.compute.recompute
        work = replace(workload_of(config, 1, "fp8", h200_page.MEMORY_BYTES), recompute=mode)
        needed = plan_memory(work).needed
        assert needed < h200_page.MEMORY_BYTES, f"{config.model.preset} needs {needed / GIB:.0f} GiB"
