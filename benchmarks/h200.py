"""Compares keepstep with the references on one GPU, in one run: `make bench-h200` writes benchmarks/results/h200.json.

    PYTHONPATH=src python -W ignore benchmarks/h200.py [PART …]

References: the torchtitan-style loop of titan_style.py, and Hugging Face Transformers under torch.compile. Times are
medians of steps after warm-up, measured with device events. The reference runs before and after ours and its mean
counts, because a GPU gets slower as it heats up. Each part is written when it is done, and named parts are added to
existing results: time on a rented GPU may run out. `lora_h200.py` adds LoRA on quantised bases, `moe.py` measures
experts, and `h200_page.py` writes all of it into docs/performance.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from titan_style import titan_step
from torch import Tensor

from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.files import write_json
from keepstep.data.formats.megatron import MegatronWriter
from keepstep.models.size import flops_per_token, mfu_llm_foundry, peak_flops
from keepstep.train.bench import bench_step
from keepstep.train.optim import newton_schulz
from keepstep.train.telemetry.recorder import Recorder
from keepstep.train.trainer import train

RESULTS = Path(__file__).parent / "results" / "h200.json"
LLAMA_1B = ("model=llama-1b", "global_batch=8", "microbatch=8", "precision=bf16")
LLAMA_3B = ("model=llama-3b", "model.seq_len=4096", "global_batch=4", "microbatch=4", "precision=bf16")
LLAMA_8B = ("model=llama-8b", "global_batch=1", "microbatch=1", "precision=bf16", "compute.recompute=auto")
LONG_ROW = ("model=llama-1b", "model.seq_len=131072", "global_batch=1", "microbatch=1", "precision=bf16",
            "compute.recompute=auto")  # fmt: skip
PRESETS = {
    "smollm": ("model=smollm-135m", "global_batch=64", "microbatch=64", "precision=bf16"),
    "mpt125m": ("model=mpt-125m", "global_batch=64", "microbatch=64", "precision=bf16", "compute.recompute=auto"),
    "mpt350m": ("model=mpt-350m", "global_batch=32", "microbatch=32", "precision=bf16", "compute.recompute=auto"),
    "mpt760m": ("model=mpt-760m", "global_batch=16", "microbatch=16", "precision=bf16", "compute.recompute=auto"),
    "gpt125m": ("model=gpt3-125m", "global_batch=64", "microbatch=64", "precision=bf16", "compute.recompute=auto"),
    "gpt375m": ("model=gpt3-375m", "global_batch=64", "microbatch=64", "precision=bf16", "compute.recompute=auto"),
    "gpt857m": ("model=gpt3-857m", "global_batch=32", "microbatch=32", "precision=bf16", "compute.recompute=auto"),
    "mpt1b": ("model=mpt-1b", "global_batch=16", "microbatch=16", "precision=bf16"),
    "gpt1b": ("model=gpt3-1.3b", "global_batch=16", "microbatch=16", "precision=bf16"),
    "mpt3b": ("model=mpt-3b", "global_batch=8", "microbatch=8", "precision=bf16", "compute.recompute=auto"),
    "mpt7b": ("model=mpt-7b", "global_batch=4", "microbatch=4", "precision=bf16", "compute.recompute=auto"),
}
"""Shapes that have no reference here."""
QUIET = ("checkpoint.at_end=false", "evaluate.at_end=false")
DOCUMENT_LOG_MEAN, DOCUMENT_LOG_SIGMA = 6.3, 1.0
"""Document lengths of the packed runs are log-normal, like those of web text: a median of 545 tokens, a mean of 898."""


def config(*words: str) -> RunConfig:
    return load_config(None, [*words, "compute.compile=true"]).config


def timed(step: Callable[[], Tensor], steps: int, warmup: int) -> dict[str, float]:
    for _ in range(warmup):
        step()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
    return {"step_s": statistics.median(seconds), "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30}


def fresh() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def titan(run: RunConfig, steps: int) -> dict[str, float]:
    fresh()
    return timed(titan_step(run.model, run.global_batch), steps, warmup=4)


def hugging_face(run: RunConfig, steps: int) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    fresh()
    shape = run.model
    with torch.device("cuda"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn_size,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, tie_word_embeddings=shape.tied,
                num_key_value_heads=shape.key_value_heads, max_position_embeddings=shape.seq_len, use_cache=False,
                attn_implementation="sdpa",
            )
        )  # fmt: skip
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, shape.vocab, (run.global_batch, shape.seq_len), device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return timed(step, steps, warmup=4)


def against_hugging_face(steps: int) -> dict[str, Any]:
    """The other reference, with our own measurement right before it."""
    run = config(*LLAMA_1B)
    own_s, theirs = ours(run, steps)["step_s"], hugging_face(run, steps)
    return {
        "llama1b_hugging_face": {**theirs, "own_step_s": own_s},
        "llama1b_bf16_vs_hugging_face": theirs["step_s"] / own_s,
    }


def ours(run: RunConfig, steps: int) -> dict[str, Any]:
    fresh()
    torch.cuda.reset_peak_memory_stats()
    return asdict(bench_step(run, steps, warmup=4))


def final_loss(precision: str, steps: int, runs_dir: Path) -> float:
    """Mean loss of the last 20 of `steps` real steps on the demo's text.

    The learning rate falls to zero, because at a high one two runs of the same precision end more than a percent apart.
    """
    fresh()
    words = [
        "model=llama-1b", "global_batch=4", "microbatch=4", f"max_duration={steps}ba", "optimizer.lr=1e-4",
        "schedule.warmup=100ba", "schedule.final=0", "data=demo", f"precision={precision}", f"name={precision}",
        f"runs_dir={runs_dir}",
        "checkpoint.at_end=false", "evaluate.at_end=false", "observe.tensorboard=false",
    ]  # fmt: skip
    train(config(*words))
    lines = [json.loads(line) for line in (runs_dir / precision / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(line["loss"] for line in lines[-20:])


def side_costs(run: RunConfig, steps: int) -> dict[str, Any]:
    """The share of a real run's step that goes into waiting for data and into telemetry, with all sinks on and all off.

    Telemetry's share is the time that the training thread spends in it. The medians of both runs show the total effect,
    within the noise of a GPU at its power limit.
    """
    spent_s: list[float] = []
    step_done = Recorder.step_done

    def timed_step_done(recorder: Recorder, *args: Any) -> None:
        started = time.perf_counter()
        step_done(recorder, *args)
        spent_s.append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tokens"
        document = np.random.default_rng(1).integers(0, run.model.vocab, (steps * run.global_batch, run.model.seq_len))
        with MegatronWriter(data, np.dtype(np.int32)) as writer:
            for row in document:
                writer.add(row)
        lines: dict[str, list[dict[str, float]]] = {}
        for name, observe in {
            "off": replace(run.observe, tensorboard=False, rank_interval=0),
            "on": replace(run.observe, tensorboard=True, rank_interval=1, metrics_port=9464),
        }.items():
            fresh()
            spent_s.clear()
            with mock.patch.object(Recorder, "step_done", timed_step_done):
                train(replace(run, name=name, runs_dir=folder, data=replace(run.data, path=str(data)), observe=observe))
            path = Path(folder) / name / "metrics.jsonl"
            # The first steps compile.
            lines[name] = [json.loads(line) for line in path.read_text().splitlines()][5:]
    medians_s = {name: statistics.median(line["step_s"] for line in of) for name, of in lines.items()}
    return {
        "steps": steps,
        "step_s": medians_s,
        "data_wait_share": statistics.mean(line["data_s"] for line in lines["on"]) / medians_s["on"],
        "telemetry_share": statistics.mean(spent_s[5:]) / medians_s["on"],
    }


def parity(steps: int, pairs: int, earlier: dict[str, list[float]], write: Callable[[dict[str, Any]], None]) -> None:
    """Loss after real steps in bf16 and in fp8, added to the `earlier` pairs; compares the means.

    Kernels whose sums have no fixed order make two runs of one precision differ nearly as much as one run of each. One
    pair says little, so there are several, and all of them stay in the results.
    """
    runs = earlier or {"bf16": [], "fp8": []}
    for _ in range(pairs):
        for precision, losses in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                losses.append(final_loss(precision, steps, Path(folder)))
        bf16, fp8 = (statistics.mean(losses) for losses in runs.values())
        found = {"steps": steps, "runs": runs, "bf16": bf16, "fp8": fp8, "relative": abs(fp8 / bf16 - 1)}
        write({"parity": found})


def against_adamw(steps: int) -> dict[str, Any]:
    """Muon's step over AdamW's, which runs before and after it; its orthogonalisation with and without our kernel."""
    adamw, muon = config(*LLAMA_1B), config(*LLAMA_1B, "optimizer=muon")
    before_s, own, after_s = ours(adamw, steps)["step_s"], ours(muon, steps), ours(adamw, steps)["step_s"]
    adamw_s = (before_s + after_s) / 2
    fresh()
    directions = [
        torch.randn(muon.model.layers, *shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
    ]

    def orthogonalise_all() -> Tensor:
        for stack in directions:
            newton_schulz.orthogonalise(stack)
        return stack

    symmetric_s = timed(orthogonalise_all, steps, warmup=3)["step_s"]
    with mock.patch.object(newton_schulz, "_SYMMETRIC_FROM", 1 << 30):
        whole_s = timed(orthogonalise_all, steps, warmup=3)["step_s"]
    return {
        "llama1b_muon": {**own, "adamw_step_s": adamw_s, "symmetric_s": symmetric_s, "whole_matmuls_s": whole_s},
        "muon_over_adamw": own["step_s"] / adamw_s,
    }


def against_stream(words: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Real steps on whole documents packed into rows, attention inside each, over those on one stream of tokens.

    The stream runs before and after, and its mean counts.
    """
    run = config(*words, *QUIET, f"max_duration={steps + 5}ba", "observe.tensorboard=false")
    random = np.random.default_rng(1)
    tokens = (steps + 5) * run.global_batch * (run.model.seq_len + 1) * 2
    median_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        data, written = Path(folder) / "tokens", 0
        with MegatronWriter(data, np.dtype(np.int32)) as writer:
            while written < tokens:
                length = 1 + int(random.lognormal(DOCUMENT_LOG_MEAN, DOCUMENT_LOG_SIGMA))
                writer.add(random.integers(0, run.model.vocab, length))
                written += length
        for name in ("stream_before", "best_fit", "stream_after"):
            fresh()
            strategy = "best_fit" if name == "best_fit" else "pack"
            source = replace(run.data, path=str(data), strategy=strategy)
            train(replace(run, name=name, runs_dir=folder, data=source))
            lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
            # The first steps compile.
            median_s[name] = statistics.median(json.loads(line)["step_s"] for line in lines[5:])
    stream_s = (median_s["stream_before"] + median_s["stream_after"]) / 2
    return {"step_s": median_s, "speed": stream_s / median_s["best_fit"]}


def packed_over_stream(steps: int) -> dict[str, Any]:
    """Speed on packed documents over that on a stream, for heads of 64 and of 128."""
    small, large = against_stream(LLAMA_1B, steps), against_stream(LLAMA_3B, steps)
    return {
        "packed_documents": {"llama-1b": small, "llama-3b": large},
        "packed_over_stream": small["speed"],
        "packed_over_stream_128": large["speed"],
    }


def against_titan(name: str, words: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Our steps in bf16 and fp8 between two measurements of the reference."""
    run = config(*words)
    before = titan(run, steps)
    bf16, fp8 = ours(run, steps), ours(replace(run, precision="fp8"), steps)
    after = titan(run, steps)
    reference_s = (before["step_s"] + after["step_s"]) / 2
    mfu = run.global_batch * run.model.seq_len / reference_s * flops_per_token(run.model, run.model.seq_len) / peak()
    return {
        f"{name}_titan": {**after, "step_s": reference_s, "mfu": mfu},
        f"{name}_bf16": bf16,
        f"{name}_fp8": fp8,
        f"{name}_bf16_vs_titan": reference_s / bf16["step_s"],
        f"{name}_fp8_vs_titan": reference_s / fp8["step_s"],
    }


def peak() -> float:
    """Floating point operations per second in bf16."""
    found = peak_flops(torch.cuda.get_device_name(), "bf16")
    assert found is not None
    return found


def llama_8b(steps: int) -> dict[str, Any]:
    """The whole training state of 8 billion parameters; the reference does not fit with fp32 weights."""
    bf16, fp8 = (ours(config(*LLAMA_8B, f"precision={precision}"), steps) for precision in ("bf16", "fp8"))
    return {"llama8b": bf16, "llama8b_fp8": fp8, "llama8b_mfu": bf16["mfu"], "llama8b_fp8_mfu": fp8["mfu"]}


def long_row(steps: int) -> dict[str, Any]:
    """One row of 131,072 tokens."""
    found = ours(config(*LONG_ROW), max(2, steps // 4))
    return {"llama1b_131072": found, "llama1b_131072_mfu": found["mfu"]}


def preset(name: str, steps: int) -> dict[str, Any]:
    """A preset without a reference, in both precisions."""
    bf16, fp8 = (ours(config(*PRESETS[name], f"precision={precision}"), steps) for precision in ("bf16", "fp8"))
    found = {name: bf16, f"{name}_mfu": bf16["mfu"], f"{name}_fp8": fp8, f"{name}_fp8_mfu": fp8["mfu"]}
    if name == "mpt1b":  # as LLM Foundry publishes it
        shape = config(*PRESETS[name]).model
        found["mpt1b_mfu"] = mfu_llm_foundry(bf16["tokens_per_s"], shape, shape.seq_len, peak())
    return found


def overhead(steps: int) -> dict[str, Any]:
    """What a real run adds to a step."""
    found = side_costs(config(*LLAMA_1B, "max_duration=40ba", *QUIET), max(40, steps))
    return {"side_costs": found, **{key: found[key] for key in ("data_wait_share", "telemetry_share")}}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "llama1b": lambda steps: against_titan("llama1b", LLAMA_1B, steps),
    "llama3b": lambda steps: against_titan("llama3b", LLAMA_3B, steps),
    "llama8b": llama_8b,
    "long": long_row,
    **{name: partial(preset, name) for name in PRESETS},
    "overhead": overhead,
    "muon": against_adamw,
    "packed": packed_over_stream,
    "hugging_face": against_hugging_face,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}, parity")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--parity-steps", type=int, default=300)
    parser.add_argument("--parity-pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.parts) - {*PARTS, "parity"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, parity")
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.parts and args.out.is_file() else {}

    def write(found: dict[str, Any]) -> None:
        result.update(found)
        write_json(args.out, result)
        for key, value in found.items():
            if isinstance(value, float):
                print(f"{key:<28}{value:.4g}", flush=True)

    write({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": args.steps})
    for part, measured in PARTS.items():
        if part in (args.parts or PARTS):
            started = time.monotonic()
            write(measured(args.steps))
            print(f"── {part}: {time.monotonic() - started:.0f} s", flush=True)
    if not args.parts or "parity" in args.parts:
        parity(args.parity_steps, args.parity_pairs, result.get("parity", {}).get("runs", {}), write)


if __name__ == "__main__":
    main()
