"""LoRA speed on one GPU with the real training loop: Llama 8B shape, rows of 4096 tokens, bf16, synthetic tokens.

    PYTHONPATH=src python benchmarks/lora_h200.py --out benchmarks/results/lora_h200.json

Prints one JSON object. `tokens_per_s` is the median over the steps after the warmup, as the run itself recorded it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from keepstep.config.load import load_config
from keepstep.observe.run_folder import RunFolder, read_from, split_kinds
from keepstep.train.trainer import train

WARMUP_STEPS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="q,k,v,o,gate,up,down")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
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
            f"runs_dir={folder}",
            "name=lora",
            *args.overrides,
        ]
        train(load_config(None, words).config)
        lines = split_kinds(read_from(RunFolder(Path(folder) / "lora").metrics)[0])["train"][WARMUP_STEPS:]
        facts = json.loads(RunFolder(Path(folder) / "lora").facts.read_text())
    result = {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines),
        "mfu": statistics.median(line.get("mfu", 0.0) for line in lines),
        "step_s": statistics.median(line["step_s"] for line in lines),
        "memory_gib": max(line["memory_gib"] for line in lines),
        "steps": len(lines),
        "losses": [line["loss"] for line in (lines[0], lines[-1])],
        "device": facts["device"],
        "torch": facts["torch"],
        "model": args.model,
        "seq_len": args.seq_len,
        "rank": args.rank,
        "targets": args.targets,
        "command": "python benchmarks/lora_h200.py " + " ".join(sys.argv[1:]),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
