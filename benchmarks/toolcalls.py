"""Function calling from random weights, offline: train the demo recipe, evaluate before and after, write the numbers.

    python benchmarks/toolcalls.py

Runs `keepstep finetune recipes/toolcalls-demo.yaml` and `keepstep eval tools` as a user would, in its own folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "toolcalls-demo.yaml"
LEAST = 0.8
MOST_BEFORE = 0.05


def keepstep(*words: str) -> None:
    print(f"── keepstep {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "keepstep", *words], check=True)


def ask(run: Path, rows: int, name: str, *more: str) -> dict[str, Any]:
    """Ask held-out questions, print the table, and return the report."""
    out = run / f"tools-{name}.json"
    keepstep("eval", "tools", str(run), "--rows", str(rows), "--out", str(out), "--max-new-tokens", "128", *more)
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--rows", type=int, default=400, help="held-out questions")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "toolcalls.json")
    parser.add_argument("overrides", nargs="*", help="section.field=value for the recipe")
    args = parser.parse_args()
    number, run = 1, args.runs_dir / "toolcalls-demo"
    while run.exists():
        number += 1
        run = args.runs_dir / f"toolcalls-demo-{number}"
    started = time.monotonic()
    words = [f"runs_dir={args.runs_dir}", f"name={run.name}", *args.overrides]
    keepstep("finetune", str(RECIPE), *words, "--procs", str(min(2, os.cpu_count() or 1)))
    before = ask(run, args.rows, "before", "--start")
    after = ask(run, args.rows, "after", "--answers", str(run / "answers.jsonl"))
    seconds = time.monotonic() - started
    result = {
        "exact_before": before["exact"],
        "exact": after["exact"],
        "irrelevance": after["irrelevance"],
        "categories": after["categories"],
        "questions": args.rows,
        "seconds": round(seconds, 1),
        "cores": os.cpu_count(),
        "run": run.name,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"exact calls {result['exact_before']:.1%} → {result['exact']:.1%}, irrelevance {result['irrelevance']:.1%}, "
          f"{seconds / 60:.1f} minutes; written to {args.out}")  # fmt: skip
    good = before["exact"] <= MOST_BEFORE and after["exact"] >= LEAST and after["irrelevance"] >= LEAST
    if not good:
        print(f"error: wanted at most {MOST_BEFORE:.0%} before, at least {LEAST:.0%} after", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
