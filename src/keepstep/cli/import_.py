"""`keepstep import`: a Hugging Face model becomes a run that can be trained, evaluated, talked to and exported."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepstep.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("source", help="a folder with config.json and safetensors, or OWNER/NAME on the hub")
    parser.add_argument("--name", help="the run's name (default: the source's)")
    parser.add_argument("--runs-dir", default="runs", help="where the run is kept (default: runs)")
    parser.add_argument("--procs", type=int, default=1, help="processes that share the weights while they are read")


def run(args: argparse.Namespace) -> int:
    """Read into shards and commit step 0; with several processes, as one of them where a launcher started us."""
    from keepstep.core.ranks import from_environment
    from keepstep.train.exchange import fetch_source, import_model, import_weights

    source = fetch_source(args.source)
    name = args.name or (Path(args.source).resolve() if Path(args.source).is_dir() else Path(args.source)).name
    config = import_model(source, name, args.runs_dir, args.procs)
    ranks = from_environment()
    where = Path(args.runs_dir) / name
    if not ranks.launched and (where / "config.yaml").exists():
        raise UsageError(f"{where} is there already", "choose another --name")
    if args.procs > 1 and not ranks.launched:
        from keepstep.cli.processes import start_processes

        words = ["import", str(source), "--name", name, "--runs-dir", args.runs_dir, "--procs", str(args.procs)]
        code = start_processes(words, args.procs)
        if code:
            return code
    else:
        import_weights(source, config)
        if ranks.launched:
            return 0
    print(f"imported {source} as {where}", file=sys.stderr)
    print(f"next: keepstep finetune --from {where} --data CONVERSATIONS.jsonl")
    return 0
