"""LoRA on one GPU with the real training loop: Llama 8B and 70B shapes, rows of 4096 tokens.

    PYTHONPATH=src python benchmarks/lora_h200.py --out benchmarks/results/lora_h200.json   # one configuration
    PYTHONPATH=src python benchmarks/lora_h200.py --part lora8b     # speed of bf16 and fp8 bases
    PYTHONPATH=src python benchmarks/lora_h200.py --part loss8b --bases bf16    # 200 real steps; again with fp8
    PYTHONPATH=src python benchmarks/lora_h200.py --part lora70b    # streamed from safetensors, peak against the plan

Each part takes at most about 200 s on an H200 and adds its keys to --out (default: benchmarks/results/h200.json).
`--tiny` runs any part on a CPU in seconds, with a small model, to test the benchmark itself.

`tokens_per_s` is the median over the steps after the warmup, as the run itself recorded it.

The 70b weights are 140 GB of safetensors, more than many disks hold. The weights of one layer and of both ends are
random numbers on disk. The files of all layers are hard links to that layer's file, whose header is rewritten with the
names of the layer that is about to be read; from there on it is the loader's own path, tensor by tensor. So all layers
have the same numbers, and reads after the first come from the page cache: `load_s` says nothing about a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from keepstep.config.hf_config import hf_config_of
from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.files import write_json
from keepstep.interop import safetensors_files
from keepstep.interop.hf_folder import load_hf
from keepstep.interop.hf_names import export_parameters
from keepstep.interop.run_source import adopt_initial_shape
from keepstep.models.transformer import Transformer
from keepstep.observe.run_folder import RunFolder, read_from, split_kinds
from keepstep.plan.memory import plan_memory
from keepstep.plan.search import recompute_modes
from keepstep.plan.workload import workload_of
from keepstep.train.device import describe_machine
from keepstep.train.trainer import train

WARMUP_STEPS = 6
RESULTS = Path(__file__).parent / "results" / "h200.json"
TINY = (
    "model=llama-1b", "model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=128",
    "model.vocab=512", "model.seq_len=32", "model.tied=false", "precision=fp32", "compute.compile=false",
    "compute.device=cpu",
)  # fmt: skip


def lora_words(args: argparse.Namespace, **more: object) -> list[str]:
    """Overrides of a run that measures; later ones win."""
    words = [
        f"model={args.model}",
        f"model.seq_len={args.seq_len}",
        "data=synthetic",
        f"lora.rank={args.rank}",
        f"lora.targets=[{args.targets}]",
        "precision=bf16",
        f"microbatch={args.microbatch}",
        f"global_batch={args.microbatch * args.accumulate}",
        f"max_duration={WARMUP_STEPS + args.steps}ba",
        "schedule.warmup=2ba",
        "optimizer.lr=2e-4",
        f"compute.compile={'false' if args.no_compile else 'true'}",
        f"compute.recompute={args.recompute}",
        # One process shards nothing: gathering the weights once for forward and backward avoids a second copy.
        "parallel.keep_gathered=true",
        "evaluate.interval=0ba",
        "evaluate.at_end=false",
        "checkpoint.interval=0ba",
        "checkpoint.at_end=false",
        "observe.tensorboard=false",
        "name=lora",
        *(TINY if args.tiny else ()),
        *(f"{key}={value}" for key, value in more.items()),
    ]
    return [*words, *args.overrides]


def run(config: RunConfig, warmup: int) -> dict[str, Any]:
    """Train, and what the run recorded after the warmup."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        train(replace(config, runs_dir=folder))
        files = RunFolder(Path(folder) / config.name)
        every = split_kinds(read_from(files.metrics)[0])["train"]
        facts = json.loads(files.facts.read_text())
    lines = every[warmup:]
    return {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines),
        "mfu": statistics.median(line.get("mfu", 0.0) for line in lines),
        "step_s": statistics.median(line["step_s"] for line in lines),
        "memory_gib": max(line["memory_gib"] for line in lines),
        "steps": len(lines),
        "losses": [line["loss"] for line in (lines[0], lines[-1])],
        "last_20_loss": statistics.mean(line["loss"] for line in every[-20:]),
        "device": facts["device"],
        "torch": facts["torch"],
    }


def one(args: argparse.Namespace) -> dict[str, Any]:
    """One configuration, as the arguments describe it."""
    measured = run(load_config(None, lora_words(args)).config, WARMUP_STEPS)
    described = {name: getattr(args, name) for name in ("model", "seq_len", "rank", "targets")}
    return {**measured, **described, "command": "python benchmarks/lora_h200.py " + " ".join(sys.argv[1:])}


def lora8b(args: argparse.Namespace) -> dict[str, Any]:
    """Speed of each base."""
    result: dict[str, Any] = {}
    for base in args.bases.split(","):
        measured = run(load_config(None, lora_words(args, **{"lora.base": base})).config, WARMUP_STEPS)
        result |= {f"lora8b_{base}": measured, f"lora8b_{base}_tokens_per_s": measured["tokens_per_s"]}
    return result


def loss8b(args: argparse.Namespace) -> dict[str, Any]:
    """Mean loss of the last 20 of 200 steps on the demo's text, from the same random weights with each base."""
    result: dict[str, Any] = {}
    for base in args.bases.split(","):
        more = {
            "lora.base": base,
            "microbatch": 1,
            "global_batch": 1,
            "max_duration": f"{8 if args.tiny else 200}ba",
            "schedule.warmup": f"{2 if args.tiny else 20}ba",
            "schedule.final": 0,
            **({} if args.tiny else {"data": "demo"}),
        }
        measured = run(load_config(None, lora_words(args, **more)).config, 4)
        # No speeds: bases may run side by side.
        result |= {f"loss8b_{base}": {key: measured[key] for key in ("last_20_loss", "losses", "device", "torch")}}
    return result


def lora70b(args: argparse.Namespace) -> dict[str, Any]:
    """Load by streaming, train, and compare the peak with the plan."""
    base = args.bases.split(",")[-1]
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        source = Path(scratch) / "weights"
        shape = load_config(None, lora_words(args)).config.model
        written_bytes = write_linked_shards(shape, source)
        words = [word for word in lora_words(args, **{"lora.base": base}) if not word.startswith("model")]
        words += [f"model.seq_len={shape.seq_len}", f"finetune.start_from={source}"]
        config = adopt_initial_shape(load_config(None, words))
        with linked_headers(shape), timed(load_hf) as spent_s:
            measured = run(config, 2)
    planned = planned_gib(config)
    result = {**measured, "base": base, "load_s": sum(spent_s), "plan_gib": planned, "disk_gb": written_bytes / 1e9}
    return {
        "lora70b": result,
        "lora70b_tokens_per_s": measured["tokens_per_s"],
        "lora70b_peak_gib": measured["memory_gib"],
        "lora70b_plan_over_peak": planned / measured["memory_gib"],
    }


def planned_gib(config: RunConfig) -> float:
    """What the planner says that torch will allocate."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = describe_machine(config, device, 1, 1)
    work = workload_of(config, 1, machine.precision, machine.memory_bytes)
    if config.compute.recompute == "auto":
        work = replace(work, recompute_by_block=tuple(recompute_modes(config, machine)))
    return plan_memory(work).allocated / 2**30


def write_linked_shards(shape: ModelConfig, folder: Path) -> int:
    """A Hugging Face folder of random weights, in which the files of all layers are the same bytes; returns them."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", dict(hf_config_of(shape, "bfloat16")))
    ends, layer = _ends(shape), _layer(shape)
    (folder / "ends.safetensors").write_bytes(b"")
    safetensors_files.write_file({name: _random(size) for name, size in ends.items()}, folder / "ends.safetensors")
    with (folder / _layer_file(0)).open("wb") as file:
        file.write(_header(layer, 0))
        for size in layer.values():
            file.write(_random(size).view(torch.uint8).numpy().tobytes())
    for number in range(1, shape.layers):
        os.link(folder / _layer_file(0), folder / _layer_file(number))
    names = dict.fromkeys(ends, "ends.safetensors")
    for number in range(shape.layers):
        names |= {_renamed(name, number): _layer_file(number) for name in layer}
    write_json(folder / safetensors_files.INDEX, {"weight_map": names})
    return sum((folder / file).stat().st_size for file in ("ends.safetensors", _layer_file(0)))


@contextmanager
def linked_headers(shape: ModelConfig) -> Iterator[None]:
    """Inside, a layer's file gets the header with its own names right before it is opened."""
    layer = _layer(shape)

    def before(read: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Path, *more: Any) -> Any:
            if file.name.startswith("layer-"):
                with file.open("r+b") as data:
                    data.write(_header(layer, int(file.stem.removeprefix("layer-"))))
            return read(file, *more)

        return opened

    with (
        mock.patch.object(safetensors_files, "_read_kinds", before(safetensors_files._read_kinds)),
        mock.patch.object(safetensors_files, "_read_tensor", before(safetensors_files._read_tensor)),
    ):
        yield


@contextmanager
def timed(load: Callable[..., None]) -> Iterator[list[float]]:
    """The seconds of each load of weights inside."""
    spent_s: list[float] = []

    def measured(*args: Any) -> None:
        started = time.perf_counter()
        load(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent_s.append(time.perf_counter() - started)

    with mock.patch("keepstep.interop.initial_weights.load_hf", measured):
        yield spent_s


def _tensors(shape: ModelConfig, layers: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = Transformer(replace(shape, layers=layers))
        exported = export_parameters(dict(model.named_parameters()), model.config, "llama")
        return {name: tensor.shape for name, tensor in exported}


def _layer(shape: ModelConfig) -> dict[str, torch.Size]:
    return {name: size for name, size in _tensors(shape, 1).items() if ".layers.0." in name}


def _ends(shape: ModelConfig) -> dict[str, torch.Size]:
    return {name: size for name, size in _tensors(shape, 1).items() if ".layers.0." not in name}


def _layer_file(number: int) -> str:
    return f"layer-{number:05d}.safetensors"


def _renamed(name: str, number: int) -> str:
    return name.replace(".layers.0.", f".layers.{number}.")


def _header(layer: dict[str, torch.Size], number: int) -> bytes:
    table, at = {}, 0
    for name, size in layer.items():
        table[_renamed(name, number)] = {
            "dtype": "BF16",
            "shape": list(size),
            "data_offsets": [at, at + 2 * size.numel()],
        }
        at += 2 * size.numel()
    text = json.dumps(table).encode().ljust(4096)
    return len(text).to_bytes(8, "little") + text


def _random(size: torch.Size) -> torch.Tensor:
    """Matrices like first weights, norms 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if len(size) < 2:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "lora8b": lora8b,
    "loss8b": loss8b,
    "lora70b": lora70b,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "lora8b": {"accumulate": 1, "steps": 12},
    "loss8b": {"accumulate": 1},
    "lora70b": {
        "model": "llama-70b",
        "microbatch": 2,
        "accumulate": 1,
        "steps": 4,
        "recompute": "full",
        # As it was measured. Blocks share their compiled code, so the default would compile them in seconds.
        "no_compile": True,
    },
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), help="what to measure (default: the one configuration below)")
    parser.add_argument("--bases", default="bf16,fp8", help="formats of the frozen weights; lora70b takes the last")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument(
        "--scratch", type=Path, help="where lora70b writes 6 GB of weights (default: the temporary folder)"
    )
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="q,k,v,o,gate,up,down")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--recompute", choices=("none", "selective", "full", "auto"), default="none")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    part = parser.parse_known_args()[0].part
    parser.set_defaults(**DEFAULTS.get(part, {}))
    return parser.parse_args()


def main() -> int:
    args = parse()
    result = PARTS[args.part](args) if args.part else one(args)
    print(json.dumps(result, indent=2))
    out = args.out or (RESULTS if args.part and not args.tiny else None)
    if out is None:
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.part:
        result = {**(json.loads(out.read_text()) if out.is_file() else {}), **result}
        losses = [result.get(f"loss8b_{base}", {}).get("last_20_loss") for base in ("bf16", "fp8")]
        if all(losses):
            result["lora8b_fp8_loss_relative"] = abs(losses[1] / losses[0] - 1)
    write_json(out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
