"""Checks on one GPU what keepstep promises on GPUs: `make test-gpu` writes benchmarks/results/gpu.json.

Real runs: recomputation modes with their peak memory, long rows, LoRA, the price of determinism, the same training
twice and once with its worker killed (equal bits?), FSDP2 over NCCL in a world of one; and tests/gpu. Needs a Hopper
GPU and nothing that a machine with PyTorch lacks. The last line says whether all held.

    PYTHONPATH=src python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepstep.core.files import write_json
from keepstep.observe.run_folder import JsonLines, RunFolder, number, split_kinds
from keepstep.resilience.fault_injection import Fault, to_environment

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "gpu.json"
STEPS, KILL_AT = 60, 25
KINDS = ("first", "second", "killed")
TEST_SHARES = 6
FEW_COMPILERS = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
"""For processes that run side by side: torch's default is a compiler for every core in each of them."""

LLAMA_1B = ("model=llama-1b", "global_batch=8", "microbatch=8", "precision=bf16", "compute.compile=true")
FSDP = ("model=llama-1b", "model.layers=4", "model.seq_len=2048", "global_batch=4", "microbatch=4", "precision=bf16")
LONG_ROW = ("model=llama-1b", "model.seq_len=131072", "global_batch=1", "microbatch=1", "precision=bf16")
LORA_8B = ("model=llama-8b", "model.seq_len=4096", "lora.rank=16", "global_batch=4", "microbatch=4", "precision=bf16")
SMALL_ROWS = ("model.seq_len=2048", "global_batch=4", "microbatch=2")
LLAMA_SHAPE = ("model=llama-1b", "model.layers=2", "model.vocab=16384")
EQUALITY_CASES: dict[str, tuple[str, ...]] = {
    "llama1b_bf16": (*LLAMA_SHAPE, "precision=bf16"),
    "llama1b_fp8": (*LLAMA_SHAPE, "precision=fp8"),
    "llama1b_lora": (*LLAMA_SHAPE, "precision=bf16", "lora.rank=16"),
    "mpt1b": ("model=mpt-1b", "model.layers=2", "model.vocab=16384", "precision=bf16"),
    "gpt1.3b": ("model=gpt3-1.3b", "model.layers=2", "model.vocab=16384", "precision=bf16"),
}
"""Shapes of a block at full width; two of them, so that a case takes seconds."""
BENCH = """
import dataclasses, json, sys
from keepstep.config.load import load_config
from keepstep.train.bench import bench_step
words, steps, warmup = json.loads(sys.argv[1])
result = bench_step(load_config(None, words).config, steps, warmup, breakdown=False)
print(json.dumps(dataclasses.asdict(result)))
"""


def start(command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """Start Python with keepstep importable."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, **pipes)


def finish(process: subprocess.Popen[str], good: Sequence[int] = (0,)) -> str:
    """Wait for a process; what it printed."""
    output, errors = process.communicate()
    if process.returncode not in good:
        raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output[-1000:]}\n{errors[-2000:]}")
    return output


def start_bench(*words: str, steps: int = 10, warmup: int = 3) -> subprocess.Popen[str]:
    """Time steps of a configuration in a process of its own."""
    return start(["-c", BENCH, json.dumps([words, steps, warmup])])


def finish_bench(process: subprocess.Popen[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(finish(process).splitlines()[-1])
    return result


def bench(*words: str, steps: int = 10, warmup: int = 3) -> dict[str, Any]:
    """Time steps while nothing else runs."""
    started = time.perf_counter()
    result = finish_bench(start_bench(*words, steps=steps, warmup=warmup))
    print(f"  {time.perf_counter() - started:.0f} s: {result['step_s']:.3f} s a step, {' '.join(words)}", flush=True)
    return result


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step, as the run recorded it last."""
    lines = split_kinds(JsonLines(RunFolder(folder).metrics).read())["train"]
    return {int(line["step"]): number(line["loss"]) for line in lines}


def final_weights_differ(first: Path, second: Path) -> bool:
    """Whether a tensor of the last checkpoints differs by a bit."""
    places = [str(RunFolder(folder).checkpoints) for folder in (first, second)]
    # 1 is the answer of a comparison that found differences.
    return bool(json.loads(finish(start(["-m", "keepstep", "ckpt", "diff", *places, "--json"]), (0, 1)))["differences"])


def start_run(name: str, words: Sequence[str], runs: Path) -> subprocess.Popen[str]:
    """Start a training; one whose name ends with `killed` has its worker killed on the way."""
    marks = runs / f"{name}-marks"
    marks.mkdir()
    faults = to_environment([Fault("kill", KILL_AT)], marks) if name.endswith("killed") else {}
    common = (
        *SMALL_ROWS, "data=synthetic", "compute.compile=true", f"max_duration={STEPS}ba", "checkpoint.interval=0ba",
        "evaluate.interval=0ba", "evaluate.at_end=false", "schedule.warmup=5ba", f"runs_dir={runs}", f"name={name}",
    )  # fmt: skip
    return start(["-m", "keepstep", "train", *words, *common], **FEW_COMPILERS, **faults)


def compare_runs(case: str, runs: Path) -> dict[str, Any]:
    """How many losses, and whether the weights, of a case's three runs are equal."""
    first, *others = (losses(runs / f"{case}-{kind}") for kind in KINDS)
    equal = min(sum(first[step] == other.get(step) for step in first) for other in others)
    weights = not any(final_weights_differ(runs / f"{case}-first", runs / f"{case}-{kind}") for kind in KINDS[1:])
    killed = any((runs / f"{case}-killed-marks").iterdir())
    return {"equal": equal, "of": STEPS, "steps": len(first), "weights_equal": weights, "killed": killed}


def start_tests() -> list[subprocess.Popen[str]]:
    """Start tests/gpu, a share in each process: most of their time goes into compiling on one core."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", str(REPOSITORY / "tests" / "gpu")]
    return [
        start(command, **FEW_COMPILERS, KEEPSTEP_TEST_SHARE=f"{share}/{TEST_SHARES}") for share in range(TEST_SHARES)
    ]


def measure_steps(found: dict[str, Any]) -> None:
    """What determinism costs, and what full recomputation saves, for Llama 1b."""
    none = (*LLAMA_1B, "compute.recompute=none")
    off, resume, elastic = (bench(*none, f"reproducible={mode}") for mode in ("off", "resume", "elastic"))
    full = bench(*LLAMA_1B, "compute.recompute=full")
    # Before and after the others: GPUs slow down with heat.
    off_step_s = (off["step_s"] + bench(*none, "reproducible=off")["step_s"]) / 2
    found["resume_over_off"], found["elastic_over_off"] = (mode["step_s"] / off_step_s for mode in (resume, elastic))
    found["peak_gib"] = {"none": resume["peak_memory_gib"], "full": full["peak_memory_gib"]}
    found["step_s"] = {"none": resume["step_s"], "full": full["step_s"]}
    found["full_over_none_peak"] = full["peak_memory_gib"] / resume["peak_memory_gib"]


def measure_sizes(found: dict[str, Any]) -> None:
    """A large model and a long row, whose memory `auto` has to manage."""
    lora = bench(*LORA_8B, "compute.compile=true", "compute.recompute=auto", steps=8)
    found["lora8b_tokens_per_s"], found["lora8b_peak_gib"] = lora["tokens_per_s"], lora["peak_memory_gib"]
    long_row = bench(*LONG_ROW, "compute.compile=true", "compute.recompute=auto", steps=2, warmup=1)
    found["seq131072_mfu"], found["seq131072_peak_gib"] = long_row["mfu"], long_row["peak_memory_gib"]


def measure_equality(found: dict[str, Any]) -> None:
    """tests/gpu, FSDP, and every case twice and once with its worker killed, side by side: sharing changes no bit."""
    tests = start_tests()
    try:
        _measure_equal_runs(found)
    finally:
        # Whatever the runs did: tests take minutes that are not to be spent twice.
        failed = sum(not _passed(process) for process in tests)
        found["tests_passed"] = not failed
        if failed:
            found.setdefault("errors", {})["tests"] = f"{failed} of {len(tests)} shares of tests/gpu failed"


def _passed(tests: subprocess.Popen[str]) -> bool:
    output, errors = tests.communicate()
    print(output[-500:] if not tests.returncode else output[-3000:] + errors[-1000:], flush=True)
    return not tests.returncode


def _measure_equal_runs(found: dict[str, Any]) -> None:
    # FSDP2 over NCCL: one process alone would do without both.
    fsdp = {
        "plain_loss": start_bench(*FSDP, "parallel.shard=-1", steps=5),
        "loss": start_bench(*FSDP, "parallel.shard=1", steps=5),
    }
    memory = Path("/dev/shm")
    # Where a run fails, the others still write, and its reason counts.
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        runs = Path(folder)
        started = time.perf_counter()
        # The first of each case compiles for the others.
        for kinds in (KINDS[:1], KINDS[1:]):
            processes = [
                start_run(f"{case}-{kind}", words, runs) for case, words in EQUALITY_CASES.items() for kind in kinds
            ]
            for process in processes:
                finish(process)
            print(f"  {len(processes)} runs ended after {time.perf_counter() - started:.0f} s", flush=True)
        cases = {case: compare_runs(case, runs) for case in EQUALITY_CASES}
    found["equality"] = cases
    found["equal_losses"] = {case: [outcome["equal"], outcome["of"]] for case, outcome in cases.items()}
    found["fsdp_world_of_one"] = {name: finish_bench(process)["loss"] for name, process in fsdp.items()}


PARTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "steps": measure_steps,
    "sizes": measure_sizes,
    "equality": measure_equality,
}


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """Each promise, and whether it held."""
    fsdp = found["fsdp_world_of_one"]
    return {
        "tests": found["tests_passed"],
        "full_over_none_peak": found["full_over_none_peak"] <= 0.5,
        "seq131072_mfu": found["seq131072_mfu"] >= 0.7,
        "lora8b_tokens_per_s": found["lora8b_tokens_per_s"] >= 15_700,
        "equal_losses": all(
            case["equal"] == case["of"] == case["steps"] and case["weights_equal"] and case["killed"]
            for case in found["equality"].values()
        ),
        "resume_over_off": found["resume_over_off"] <= 1.03,
        "elastic_over_off": found["elastic_over_off"] <= 1.08,
        "fsdp": abs(fsdp["loss"] - fsdp["plain_loss"]) < 0.02 * fsdp["plain_loss"],
    }


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measure these only, no verdict")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: there is no GPU here\n hint: run this on a machine with a Hopper GPU", file=sys.stderr)
        return 3
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    started = time.perf_counter()
    for part in args.parts:
        before = time.perf_counter()
        try:
            PARTS[part](found)
        except (RuntimeError, OSError, KeyError, ValueError) as error:
            # The other parts still tell something, and time on a rented GPU is short.
            found.setdefault("errors", {})[part] = str(error)
            print(f"{part} failed: {error}", file=sys.stderr, flush=True)
        print(f"{part}: {time.perf_counter() - before:.0f} s", flush=True)
        # Written after each part: time on a rented GPU may end before the run.
        write_json(args.out, found)
    found["minutes"] = (time.perf_counter() - started) / 60
    if set(args.parts) == set(PARTS) and "errors" not in found:
        found["held"] = verdict(found)
        found["passed"] = all(found["held"].values())
    write_json(args.out, found)
    print(json.dumps(found, indent=2))
    return 0 if found.get("passed", set(args.parts) != set(PARTS)) and "errors" not in found else 1


if __name__ == "__main__":
    sys.exit(main())
