"""`keepstep data build` and `keepstep data pipeline`: from raw text to tokens."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from keepstep.cli.parser import Actions, add_action, size
from keepstep.core.errors import EXIT_DONE, UsageError
from keepstep.core.interrupts import exit_code_of
from keepstep.core.messages import invalid_value
from keepstep.core.proc import available_cores
from keepstep.core.verbosity import progress


def add_build(actions: Actions) -> None:
    """Add `build`."""
    add = add_action(actions, "build", _build, "turn raw text into tokenised .bin/.idx or MDS files").add_argument
    places = "files, folders, patterns, s3://, az://, gs:// and https:// addresses"
    add("inputs", nargs="+", help=f"{places}, hf://datasets/OWNER/NAME/PATTERN, or c4:[SUBSET/]SPLIT")
    add("--out", required=True, type=Path, help="folder to write; the same command again resumes the build")
    add("--tokenizer", required=True, help="a tokenizer.json, a folder with one, or OWNER/NAME on the Hugging Face Hub")
    add("--format", choices=("megatron", "mds"), default="megatron", help="default: megatron (.bin/.idx)")
    add("--field", default="text", help="JSON field or column with the text; a.b is a nested field")
    add("--bos", default="", help="text of the token before each document")
    add("--eos", default="", help="text of the token after each document, for example '<|endoftext|>'")
    add("--concat", type=int, default=0, help="MDS: concatenate documents into samples of N tokens")
    add("--dtype", choices=("auto", "uint16", "int32"), default="auto", help="token type on disk")
    add("--lines", action="store_true", help="plain text: each line is a document")
    filters = "quality filters, see the docs"
    add("--filter", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help=filters)
    add("--limit", type=int, default=0, help="stop after N samples")
    add("--workers", type=int, default=0, help="processes on this machine (default: one for each core)")
    add("--task", default="0/1", metavar="I/N", help="do only this share of the tasks (for job arrays)")
    add("--task-bytes", type=size, default=0, help="input in one task, for example 64MiB")
    add("--task-per-file", action="store_true", help="each input file is one task, and one .bin/.idx pair")
    add("--max-document", type=size, default=1 << 26, help="larger documents are rejected")
    add("--max-reject-share", type=float, default=0.01, help="stop above this share of bad records")
    add("--json", action="store_true", help="facts as JSON")


def _build(args: argparse.Namespace) -> int:
    """Plan, build and print the facts."""
    import gc
    import os

    from keepstep.data.fast_tokenizer import FastLoad

    args.tokenizer = _tokenizer_file(args.tokenizer)
    # Started before the other imports, which take about as long.
    loading = FastLoad(args.tokenizer)
    # A build needs no BLAS, and the threads that numpy's BLAS starts would spin on a core that is loading.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from keepstep.data.prepare.build import build
    from keepstep.data.prepare.filters import parse_filters
    from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file
    from keepstep.data.prepare.records import RecordOptions

    inputs, limit = _named_inputs(args.inputs, args.limit)
    options = BuildOptions(
        inputs=inputs,
        tokenizer_sha256=sha256_file(args.tokenizer),
        format=args.format,
        records=RecordOptions(args.field, args.max_document, args.lines),
        filters=parse_filters(args.filter),
        bos=args.bos,
        eos=args.eos,
        concat=args.concat,
        dtype=args.dtype,
        limit=limit,
        task_bytes=args.task_bytes,
        task_per_file=args.task_per_file,
        max_reject_share=args.max_reject_share,
    )
    if args.workers < 0:
        wrong = invalid_value("--workers", args.workers, "must not be negative")
        raise UsageError(wrong, "leave it out for one for each core")
    workers = args.workers or available_cores()
    share = _parse_share(args.task)
    try:
        facts = build(args.out, make_plan(options), args.tokenizer, workers=workers, share=share, loading=loading)
    except KeyboardInterrupt as error:
        print("interrupted: finished tasks are kept, the same command resumes from there", file=sys.stderr)
        return exit_code_of(error)
    # Spare the last garbage collections a walk over all imports: the end of the process frees them anyway.
    gc.freeze()
    if facts is None:
        progress(f"share {args.task} of {args.out} is done; other shares are not")
        print("next: run the other shares, or the same command without --task")
        return EXIT_DONE
    _print_build(args.out, facts, as_json=args.json)
    return EXIT_DONE


def _named_inputs(inputs: list[str], limit: int) -> tuple[tuple[str, ...], int]:
    """Inputs with `c4:SUBSET/SPLIT` expanded to its files; a small split has its own limit."""
    found = []
    for name in inputs:
        if name.startswith("c4:"):
            from keepstep.data.prepare.stages import c4_split

            pattern, samples = c4_split(name.removeprefix("c4:"))
            found.append(pattern)
            limit = limit or samples
        else:
            found.append(name)
    return tuple(found), limit


def _parse_share(text: str) -> Any:
    """`--task I/N` as a share of the tasks."""
    from keepstep.data.prepare.build import Share

    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise UsageError(invalid_value("--task", text, "must be I/N with 0 ≤ I < N"), "--task 0/4 is the first of four")
    return Share(int(number), int(of))


def _print_build(out: Path, facts: dict[str, Any], *, as_json: bool) -> None:
    """Print the facts of a build and the next command."""
    if as_json:
        print(json.dumps({key: value for key, value in facts.items() if key != "files"}))
        return
    from keepstep.data.prepare.records import remedy_for

    print(f"documents {facts['documents']:,}")
    print(f"tokens    {facts['tokens']:,}")
    print(f"files     {len(facts['files']):,} in {out}")
    for title, counts in (("rejected", facts["rejects"]), ("dropped", facts["dropped"])):
        if counts:
            print(f"{title:<9} " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items()))
    for reason, _ in Counter(facts["rejects"]).most_common(3):
        print(f"          {reason}: {remedy_for(reason)}")
    if facts["rejects"]:
        print(f"          samples in {out / 'rejects.jsonl'}")
    data = shlex.quote(f"data.path={out}")
    print(f"next: keepstep data inspect {shlex.quote(str(out))}   or   keepstep train run.yaml {data}")


def _tokenizer_file(name: str) -> Path:
    """The tokenizer.json that `--tokenizer` names; one on the Hub is downloaded."""
    from keepstep.data.tokenization import tokenizer_file

    path = tokenizer_file(name)
    if not path.is_file():
        what = "is missing" if path == Path(name) else "has no tokenizer.json"
        raise UsageError(f"--tokenizer {name} {what}", "keepstep data train-tokenizer makes one")
    return path


def add_pipeline(actions: Actions) -> None:
    """Add `pipeline`."""
    summary = "download, extract, concatenate to N files and tokenise, in stages"
    add = add_action(actions, "pipeline", _pipeline, summary).add_argument
    add("inputs", nargs="+", help="slimpajama, or as for build")
    add("--out", required=True, type=Path, help="folder for all stages; the same command again resumes")
    add("--tokenizer", required=True, help="as for build")
    add("--eos", default="", help="text of the token after each document")
    add("--files", type=int, default=0, help="use this many files, evenly spread (default: all)")
    into = "files to concatenate into (default: one for each input, at most 72)"
    add("--into", type=int, default=0, help=into)
    add("--stage", choices=("download", "extract", "concatenate", "tokenise"), help="run only this stage")
    add("--task", default="0/1", metavar="I/N", help="do only this share of each stage")
    add("--workers", type=int, default=0, help="default: one for each core")
    add("--rate", type=size, default=0, help="mean download rate per second, for example 50MB")
    add("--field", default="text", help="JSON field with the text")


def _pipeline(args: argparse.Namespace) -> int:
    """Run the stages in order, each once its inputs are complete."""
    from keepstep.data.prepare.stage_files import STAGES
    from keepstep.data.prepare.stages import SLIMPAJAMA, Pipeline
    from keepstep.data.remote.hub import RateLimit

    for name in ("files", "into", "workers"):
        if getattr(args, name) < 0:
            wrong = invalid_value(f"--{name}", getattr(args, name), "must not be negative")
            raise UsageError(wrong, f"leave --{name} out for its default")
    if args.stage in (None, "tokenise"):
        from keepstep.data.tokenization import load, special_id

        args.tokenizer = _tokenizer_file(args.tokenizer)
        # Fail before hours of download and not after them.
        tokenizer = load(args.tokenizer)
        if args.eos:
            special_id(tokenizer, args.eos, args.tokenizer)
    workers = args.workers or available_cores()
    inputs = tuple(SLIMPAJAMA if name == "slimpajama" else name for name in args.inputs)
    work = Pipeline(args.out, inputs, args.files, args.into, _parse_share(args.task), workers, RateLimit(args.rate))
    for stage in (args.stage,) if args.stage else STAGES:
        progress(f"stage {stage}")
        if stage == "tokenise":
            facts = work.tokenise(args.tokenizer, args.eos, args.field)
            if facts is None:
                print("next: run the other shares of --stage tokenise")
            else:
                _print_build(work.folder(stage), facts, as_json=False)
            return EXIT_DONE
        if not work.run(stage):
            print(f"share {args.task} of {stage} is done; other shares are not")
            print("next: run the other shares, then the same command again")
            return EXIT_DONE
    print(f"next: the same command without --stage {args.stage}")
    return EXIT_DONE
