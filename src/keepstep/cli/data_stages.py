"""`keepstep data pipeline`: download, extract, concatenate and tokenise, each stage only when its inputs are whole."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from keepstep.cli.data_common import add_action, parse_share, print_build, size
from keepstep.core.errors import EXIT_DONE, DataError, UsageError


def add_actions(actions: Any) -> None:
    """Add the sub-parser."""
    parser = add_action(
        actions, "pipeline", pipeline, "download, extract, concatenate to N files and tokenise, in stages"
    )
    parser.add_argument("inputs", nargs="+", help="slimpajama, or as for build")
    parser.add_argument("--out", required=True, type=Path, help="folder for all stages; the same command again goes on")
    parser.add_argument("--tokenizer", required=True, type=Path, help="a tokenizer.json")
    parser.add_argument("--eos", default="", help="text of the token after each document")
    parser.add_argument("--files", type=int, default=0, help="take this many files, evenly spread; default: all")
    parser.add_argument(
        "--into", type=int, default=0, help="files to concatenate into; default: 72, or as many as there are"
    )
    parser.add_argument("--stage", choices=("download", "extract", "concatenate", "tokenise"), help="one stage alone")
    parser.add_argument("--task", default="0/1", metavar="I/N", help="do only this share of each stage")
    parser.add_argument("--workers", type=int, default=0, help="default: one a core")
    parser.add_argument("--rate", type=size, default=0, help="mean download rate a second, for example 50MB")
    parser.add_argument("--field", default="text", help="JSON field with the text")


def pipeline(args: argparse.Namespace) -> int:
    """Run the stages in order."""
    from keepstep.data.hub import Pace
    from keepstep.data.stage_files import STAGES
    from keepstep.data.stages import SLIMPAJAMA, Pipeline

    for name in ("files", "into", "workers"):
        if getattr(args, name) < 0:
            raise UsageError(
                f"--{name} is {getattr(args, name)}, but it must not be negative", f"leave --{name} out for its default"
            )
    if args.stage in (None, "tokenise"):
        _check_tokenizer(args.tokenizer, args.eos)
    workers = args.workers or len(os.sched_getaffinity(0))
    inputs = tuple(SLIMPAJAMA if name == "slimpajama" else name for name in args.inputs)
    work = Pipeline(args.out, inputs, args.files, args.into, parse_share(args.task), workers, Pace(args.rate))
    for stage in (args.stage,) if args.stage else STAGES:
        print(f"stage {stage}", file=sys.stderr)
        if stage == "tokenise":
            return _tokenise(args, work.folder("concatenate"), work.folder("tokenise"), workers)
        if not work.run(stage):
            print(f"share {args.task} of {stage} is done; other shares are not")
            print("next: run the other shares, then the same command again")
            return EXIT_DONE
    print(f"next: the same command without --stage {args.stage}")
    return EXIT_DONE


def _check_tokenizer(path: Path, eos: str) -> None:
    """Before hours of download, not after them."""
    from keepstep.data.tokenize import load, special_id

    if not path.is_file():
        raise UsageError(f"--tokenizer {path} is missing", "keepstep data train-tokenizer makes one")
    tokenizer = load(path)
    if eos:
        special_id(tokenizer, eos, path)


def _tokenise(args: argparse.Namespace, source: Path, out: Path, workers: int) -> int:
    from keepstep.data.build.plan import BuildOptions, make_plan, sha256_file
    from keepstep.data.build.run import build
    from keepstep.data.records import RecordOptions
    from keepstep.data.stage_files import DONE, whole_files

    if not (source / DONE).is_file():
        raise DataError("tokenise cannot start: concatenate is not whole", "run --stage concatenate first, every share")
    whole_files(source)
    options = BuildOptions(
        inputs=(str(source / "*.jsonl"),),
        tokenizer_sha256=sha256_file(args.tokenizer),
        records=RecordOptions(args.field),
        eos=args.eos,
        task_per_file=True,
    )
    facts = build(out, make_plan(options), args.tokenizer, workers=workers, share=parse_share(args.task))
    if facts is None:
        print("next: run the other shares of --stage tokenise")
    else:
        print_build(out, facts, as_json=False)
    return EXIT_DONE
