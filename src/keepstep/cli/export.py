"""`keepstep export`: a run becomes a folder that transformers and vLLM load, checked by reading it back."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.core.units import format_bytes, format_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--hf", type=Path, metavar="OUT", help="write a Hugging Face folder; adapters are merged")
    parser.add_argument("--adapter", type=Path, metavar="OUT", help="write a LoRA run's adapters as PEFT files")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="precision of files")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Write, check, and say what came out."""
    from keepstep.train.exchange import export_adapter, export_model

    if (args.hf is None) == (args.adapter is None):
        raise UsageError("nothing says what to write", "give either --hf OUT or --adapter OUT")
    if args.adapter is not None:
        out = export_adapter(args.run, args.adapter)
        print(json.dumps({"folder": str(out)}) if args.json else f"wrote {out}: load it with peft.PeftModel")
        return 0
    exported = export_model(args.run, args.hf, args.dtype)
    if args.json:
        print(json.dumps({**asdict(exported), "folder": str(exported.folder)}, indent=2))
        return 0
    theirs = exported.difference_transformers
    print(f"wrote        {exported.folder}: {exported.family}, {format_count(exported.parameters)} parameters")
    print(f"weights      {exported.dtype}, {format_bytes(exported.weight_bytes)}")
    print(f"read back    logits within {exported.difference:.1e} of the trained model")
    print(f"transformers {'not installed: not compared' if theirs is None else f'logits within {theirs:.1e}'}")
    print(f"next: vllm serve {exported.folder} --enable-auto-tool-choice --tool-call-parser hermes")
    return 0
