"""Writes the measured part of docs/performance.md from benchmarks/results/h200.json and moe.json.

    PYTHONPATH=src python benchmarks/h200_page.py

`make bench-h200` ends with it. A test compares the page with the results, so no figure in that part is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from keepstep.config.load import load_config
from keepstep.config.presets import PRESETS
from keepstep.models.size import parameter_count
from keepstep.plan.memory import plan_memory
from keepstep.plan.workload import workload_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
MARKERS = ("<!-- h200: written by benchmarks/h200_page.py -->", "<!-- end of h200 -->")
PRECISIONS = ("bf16", "fp8")
MEMORY_BYTES = int(139.8 * 2**30)
_REFERENCES = {"_titan": "torchtitan-style loop", "_hugging_face": "Hugging Face Transformers, compiled"}
"""References by the end of their key; what stands before it names our own measurement in bf16, which has the shape."""
_TABLE = """\
| Model | Rows | Precision | tokens/s | MFU | peak memory | step | matmuls | attention | optimizer | the rest |
|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """One measured step."""

    name: str
    rows: str
    precision: str
    tokens_per_s: float
    mfu: float | None
    memory_gib: float
    step_s: float
    parts_s: Mapping[str, float]
    """Seconds by kind of kernel; empty where no profile was taken."""

    def line(self) -> str:
        """As a line of the table."""
        mfu = "–" if self.mfu is None else f"{self.mfu:.1%}"
        cells = [self.name, self.rows, self.precision, f"{self.tokens_per_s:,.0f}", mfu, f"{self.memory_gib:.0f} GiB"]
        cells.append(f"{self.step_s * 1000:.1f} ms")
        named = {kind: self.parts_s.get(kind, 0.0) for kind in ("matmul", "attention", "optimizer")}
        rest = sum(self.parts_s.values()) - sum(named.values())
        cells += [f"{each * 1000:.1f}" if self.parts_s else "–" for each in (*named.values(), rest)]
        return f"| {' | '.join(cells)} |"


def render(results: Mapping[str, Any], experts: Mapping[str, Any]) -> str:
    """The part of the page between the markers."""
    lines = [_TABLE, *(row.line() for row in table(results, experts)), ""]
    if missing := unmeasured(results, experts):
        lines += [*wrap(f"These fit on the GPU and have not been measured yet: {', '.join(missing)}.", 125), ""]
    return "\n".join([*lines, *sentences(results)])


def table(results: Mapping[str, Any], experts: Mapping[str, Any]) -> list[Row]:
    """All measured steps, by model and precision, each reference before what it is compared with."""
    steps = sorted(_steps(results, experts), key=lambda item: (item[1]["parameters"], item[1]["precision"]))
    adapted = [_adapted(results, precision) for precision in PRECISIONS if f"lora8b_{precision}" in results]
    return [row for key, step in steps for row in (*_references(results, key, step), _row(key, step))] + adapted


def unmeasured(results: Mapping[str, Any], experts: Mapping[str, Any]) -> list[str]:
    """Presets whose whole training state fits on the GPU, in the precisions that the results lack."""
    measured = {(step["model"], step["precision"]) for _, step in _steps(results, experts) if _is_whole(step)}
    fitting = [name for name in PRESETS if name != "mpt-tiny" and _fits(name)]
    missing = {name: [each for each in PRECISIONS if (name, each) not in measured] for name in fitting}
    return [f"{name} ({', '.join(each)})" for name, each in missing.items() if each]


def sentences(results: Mapping[str, Any]) -> list[str]:
    """What the results say besides steps: ratios, costs and parity."""
    said = []
    for name in ("llama1b", "llama3b"):
        if f"{name}_bf16_vs_titan" in results:
            ratios = [results[f"{name}_{precision}_vs_titan"] for precision in PRECISIONS]
            model = results[f"{name}_bf16"]["model"]
            said.append(f"{model} over the torchtitan-style loop: {ratios[0]:.2f} × in bf16, {ratios[1]:.2f} × in fp8.")
    if "llama1b_bf16_vs_hugging_face" in results:
        ratio, own_s = results["llama1b_bf16_vs_hugging_face"], results["llama1b_hugging_face"]["own_step_s"]
        said.append(
            f"llama-1b over Hugging Face Transformers: {ratio:.2f} × in bf16, {own_s * 1000:.1f} ms in that run."
        )
    if "mpt1b_mfu" in results:
        said.append(f"mpt-1b in bf16 by LLM Foundry's formula: {results['mpt1b_mfu']:.1%} MFU.")
    for model, found in results.get("packed_documents", {}).items():
        own, stream = found["step_s"]["best_fit"], found["speed"] * found["step_s"]["best_fit"]
        said.append(
            f"{model} on packed documents: {own * 1000:.1f} ms per step, {stream * 1000:.1f} on a stream of tokens, "
            f"so {found['speed']:.2f} × as fast."
        )
    if "muon_over_adamw" in results:
        steps = [results["llama1b_muon"][key] * 1000 for key in ("step_s", "adamw_step_s")]
        said.append(f"llama-1b with Muon: {steps[0]:.0f} ms per step, with AdamW {steps[1]:.0f} in the same run.")
    if "lora70b" in results:
        large = results["lora70b"]
        said.append(
            f"llama-70b, LoRA on an {large['base']} base: {large['tokens_per_s']:,.0f} tokens/s, "
            f"{large['memory_gib']:.1f} GiB at the peak, planned {large['plan_gib']:.1f}."
        )
    if "lora8b_fp8_loss_relative" in results:
        bf16, fp8 = (results[f"loss8b_{base}"]["last_20_loss"] for base in PRECISIONS)
        said.append(f"llama-8b, LoRA after 200 real steps: loss {bf16:.4f} on a bf16 base, {fp8:.4f} on an fp8 base.")
    if "side_costs" in results:
        waits, telemetry = results["data_wait_share"], results["telemetry_share"]
        said.append(
            f"A real run of llama-1b waits {waits:.3%} of a step for data and spends {telemetry:.2%} on telemetry."
        )
    if "parity" in results:
        parity = results["parity"]
        said.append(
            f"llama-1b after {parity['steps']} real steps, means of {len(parity['runs']['bf16'])} pairs: loss "
            f"{parity['bf16']:.4f} in bf16 and {parity['fp8']:.4f} in fp8."
        )
    return [f"- {sentence}" for sentence in said]


def _steps(results: Mapping[str, Any], experts: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Everything that `bench_step` measured, also one level deeper."""
    for key, value in (*results.items(), *experts.items()):
        for inner, step in ((key, value), *(value.items() if isinstance(value, dict) else ())):
            if isinstance(step, dict) and "breakdown" in step:
                yield inner, step


def _references(results: Mapping[str, Any], key: str, own: Mapping[str, Any]) -> Iterator[Row]:
    tokens = own["global_batch"] * own["seq_len"]
    for end, name in _REFERENCES.items():
        found = results.get(key.removesuffix("_bf16") + end) if key.endswith("_bf16") else None
        if found is not None:
            speed = tokens / found["step_s"]
            mfu = own["mfu"] * speed / own["tokens_per_s"]
            yield Row(name, _rows(own), "bf16", speed, mfu, found["peak_memory_gib"], found["step_s"], {})


def _row(key: str, step: Mapping[str, Any]) -> Row:
    name = step["model"] if _is_whole(step) else f"{step['model']}, {step['parameters'] / 1e9:.2f}B of it"
    name = f"**{name}**" + (", Muon" if key.endswith("_muon") else "")
    measured = (step["tokens_per_s"], step["mfu"], step["peak_memory_gib"], step["step_s"], step["breakdown"])
    return Row(name, _rows(step), step["precision"], *measured)


def _adapted(results: Mapping[str, Any], base: str) -> Row:
    found = results[f"lora8b_{base}"]
    rows = round(found["tokens_per_s"] * found["step_s"] / 4096)
    name = "**llama-8b**, LoRA of rank 16" + (" on an fp8 base" if base == "fp8" else "")
    measured = (found["tokens_per_s"], found["mfu"], found["memory_gib"], found["step_s"])
    return Row(name, f"{rows} of 4096", "bf16", *measured, {})


def _rows(step: Mapping[str, Any]) -> str:
    return f"{step['global_batch']} of {step['seq_len']}"


def _is_whole(step: Mapping[str, Any]) -> bool:
    """Whether the step is of all layers of its preset."""
    return bool(step["parameters"] == parameter_count(load_config(None, [f"model={step['model']}"]).config.model))


def _fits(preset: str) -> bool:
    words = [f"model={preset}", "global_batch=1", "microbatch=1", "compute.recompute=full"]
    work = workload_of(load_config(None, words).config, 1, "bf16", MEMORY_BYTES)
    return plan_memory(work).needed <= MEMORY_BYTES


def read_results() -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of h200.json and of moe.json."""
    folder = ROOT / "benchmarks" / "results"
    results, experts = (json.loads((folder / f"{name}.json").read_text()) for name in ("h200", "moe"))
    return results, experts


def write_page() -> None:
    """Rewrite the page between the markers."""
    before, _, rest = PAGE.read_text().partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    PAGE.write_text(f"{before}{MARKERS[0]}\n{render(*read_results())}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    write_page()
