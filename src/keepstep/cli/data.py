"""`keepstep data`: prepare, check and look at training data."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from keepstep.cli import data_chat, data_look, data_stages
from keepstep.cli.data_common import add_action, parse_share, print_build, size
from keepstep.core.endings import exit_code_of
from keepstep.core.errors import EXIT_DATA, EXIT_DONE, DataError, UsageError

HAS_ACTIONS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_build(actions)
    _add_verify(actions)
    _add_merge(actions)
    data_look.add_actions(actions)
    data_stages.add_actions(actions)
    data_chat.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Call the action's function; a disk or a path that does not do is the user's to mend."""
    try:
        code: int = args.call(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise DataError(
            f"{where}{error.strerror or error}",
            "check the path, its rights and the room on its disk, then start the same command again",
        ) from error
    return code


def _add_build(actions: Any) -> None:
    parser = add_action(actions, "build", build, "turn raw text into tokenised .bin/.idx or MDS files")
    parser.add_argument(
        "inputs",
        nargs="+",
        help="files, folders, patterns, s3://, az://, gs:// and https:// addresses, hf://datasets/OWNER/NAME/PATTERN, "
        "or c4:[SUBSET/]SPLIT",
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write; the same command again goes on")
    parser.add_argument("--tokenizer", required=True, type=Path, help="a tokenizer.json")
    parser.add_argument(
        "--format", choices=("megatron", "mds"), default="megatron", help="default: megatron (.bin/.idx)"
    )
    parser.add_argument("--field", default="text", help="JSON field or column with the text; dots go deeper")
    parser.add_argument("--bos", default="", help="text of the token before each document")
    parser.add_argument("--eos", default="", help="text of the token after each document, for example '<|endoftext|>'")
    parser.add_argument("--concat", type=int, default=0, help="MDS: join documents and cut every N tokens")
    parser.add_argument("--dtype", choices=("auto", "uint16", "int32"), default="auto", help="token type on disk")
    parser.add_argument("--lines", action="store_true", help="plain text: each line is a document")
    parser.add_argument(
        "--filter", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help="quality filters, see the docs"
    )
    parser.add_argument("--limit", type=int, default=0, help="stop after N samples")
    parser.add_argument("--workers", type=int, default=0, help="processes on this machine; default: one a core")
    parser.add_argument("--task", default="0/1", metavar="I/N", help="do only this share of the tasks (arrays of jobs)")
    parser.add_argument("--task-bytes", type=size, default=0, help="input in one task, for example 64MiB")
    parser.add_argument(
        "--task-per-file", action="store_true", help="each input file is one task, and one .bin/.idx pair"
    )
    parser.add_argument("--max-document", type=size, default=1 << 26, help="larger documents are rejected")
    parser.add_argument("--max-reject-share", type=float, default=0.01, help="stop above this share of bad records")
    parser.add_argument("--json", action="store_true", help="facts as JSON")


def build(args: argparse.Namespace) -> int:
    """Plan, build, and say what came out."""
    import gc
    import os

    from keepstep.data.fast import FastLoad

    if not args.tokenizer.is_file():
        raise UsageError(f"--tokenizer {args.tokenizer} is missing", "keepstep data train-tokenizer makes one")
    # Before the other imports, which take about as long.
    loading = FastLoad(args.tokenizer)
    # A build multiplies no matrices; numpy's BLAS would start threads, and they spin, on a core that is loading.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from keepstep.data.build.plan import BuildOptions, make_plan, sha256_file
    from keepstep.data.build.run import build as run_build
    from keepstep.data.filters import parse_filters
    from keepstep.data.records import RecordOptions

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
        raise UsageError(f"--workers is {args.workers}, but it must not be negative", "leave it out for one a core")
    workers = args.workers or len(os.sched_getaffinity(0))
    share = parse_share(args.task)
    try:
        facts = run_build(args.out, make_plan(options), args.tokenizer, workers=workers, share=share, loading=loading)
    except KeyboardInterrupt as error:
        print("interrupted: finished tasks are kept, the same command goes on from there", file=sys.stderr)
        return exit_code_of(error)
    # The interpreter's last collections need not walk all that was imported: the process's end frees it.
    gc.freeze()
    if facts is None:
        print(f"share {args.task} of {args.out} is done; other shares are not", file=sys.stderr)
        print("next: run the other shares, or the same command without --task")
        return EXIT_DONE
    print_build(args.out, facts, as_json=args.json)
    return EXIT_DONE


def _named_inputs(inputs: list[str], limit: int) -> tuple[tuple[str, ...], int]:
    """Inputs with `c4:SUBSET/SPLIT` written out; a small split brings its own limit."""
    found = []
    for name in inputs:
        if name.startswith("c4:"):
            from keepstep.data.stages import c4_split

            pattern, samples = c4_split(name.removeprefix("c4:"))
            found.append(pattern)
            limit = limit or samples
        else:
            found.append(name)
    return tuple(found), limit


def _add_verify(actions: Any) -> None:
    parser = add_action(actions, "verify", verify, "hold every file of a build against its checksum")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mend", action="store_true", help="take the marks of damaged tasks away: build redoes them")
    parser.add_argument("--json", action="store_true")


def verify(args: argparse.Namespace) -> int:
    """Name each damaged file and the task that makes it again."""
    from keepstep.data.build.verify import verify as check

    checked, damages = check(args.folder, mend=args.mend)
    if args.json:
        print(json.dumps({"files": checked, "damages": [vars(damage) for damage in damages]}))
        return EXIT_DATA if damages else EXIT_DONE
    for damage in damages:
        who = "the build" if damage.task is None else f"task {damage.task}"
        print(f"damaged  {who}  {damage.file} {damage.what}")
    if not damages:
        print(f"whole    {checked} files match their checksums")
        print(f"next: keepstep data inspect {args.folder}")
        return EXIT_DONE
    tasks = sorted({damage.task for damage in damages if damage.task is not None})
    redone = f"redoes task {_listed(tasks)}" if tasks else "writes what is missing"
    print(f"next: keepstep data verify {args.folder} --mend   then the build again: it {redone}")
    return EXIT_DATA


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "")


def _add_merge(actions: Any) -> None:
    parser = add_action(actions, "merge", merge, "join the .bin/.idx pairs of a folder into one pair")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", required=True, type=Path, help="prefix to write, for example data/set_text_document")


def merge(args: argparse.Namespace) -> int:
    """Write one pair and say how large it is."""
    from keepstep.data.build.merge import merge as join
    from keepstep.data.build.plan import is_unfinished, unfinished_error
    from keepstep.data.formats.megatron import find_prefixes

    if is_unfinished(args.folder):
        raise unfinished_error(str(args.folder))
    if args.out.parent.resolve() == args.folder.resolve():
        raise UsageError(
            f"--out {args.out} lies in the folder that is merged: its documents would be in there twice",
            "name a prefix in a folder of its own",
        )
    prefixes = find_prefixes(args.folder)
    if not prefixes:
        raise DataError(f"{args.folder} holds no .bin/.idx pairs", "name a folder that keepstep data build wrote")
    documents, tokens = join(prefixes, args.out)
    print(f"documents {documents:,}")
    print(f"tokens    {tokens:,}")
    print(f"next: keepstep data inspect {args.out}")
    return EXIT_DONE
