"""`keepstep data show`, `chat` and `check`: conversations as a model sees them, converted, and free of a benchmark."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from keepstep.cli.parser import Actions, add_action, positive, writable
from keepstep.core.errors import EXIT_DATA, EXIT_DONE, DataError, UsageError
from keepstep.core.files import write_atomic
from keepstep.core.messages import invalid_value
from keepstep.core.terminal import wants_colour
from keepstep.core.verbosity import progress

_FORMATS = ("auto", "messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca")


def add_actions(actions: Actions) -> None:
    """`show`, `chat` and `check`, among the actions of `keepstep data`."""
    show = add_action(actions, "show", _show, "show conversations as a model sees them")
    show.add_argument(
        "path", help="conversations (.jsonl, .json, .parquet, a folder of them), toolcalls or toolcalls-domains"
    )
    show.add_argument("--rows", type=int, default=3, help="rows to show (default: 3)")
    show.add_argument("--first", type=int, default=1, help="number of the first row (default: 1)")
    show.add_argument("--tokenizer", type=Path, help="a tokenizer.json; its folder's chat template is used")
    show.add_argument("--template", default="", help="a jinja2 chat template instead")
    show.add_argument("--format", choices=_FORMATS, default="auto", help="how rows are written (default: auto)")
    show.add_argument(
        "--loss-on", choices=("assistant", "tool_calls", "all"), default="assistant", help="what carries a loss"
    )
    show.add_argument("--tokens", action="store_true", help="show where tokens end; needs --tokenizer")
    chat = add_action(actions, "chat", _chat, "convert conversations to canonical rows, or generate some")
    chat.add_argument(
        "path", help="conversations in any known format, or toolcalls or toolcalls-domains to generate them"
    )
    chat.add_argument("--out", type=Path, required=True, help="canonical .jsonl to write")
    chat.add_argument("--valid-out", type=Path, help="write the held-out share here")
    chat.add_argument("--valid-share", type=float, help="share held out for --valid-out (default: 0.05)")
    chat.add_argument("--seed", type=int, default=0, help="of the split, and of generated rows")
    chat.add_argument("--count", type=int, default=1000, help="rows to generate (default: 1000)")
    chat.add_argument("--split", choices=("train", "test"), default="train", help="functions to generate from")
    chat.add_argument(
        "--categories", metavar="LIST", help="generate these alone: simple, multiple, parallel, irrelevance"
    )
    chat.add_argument("--format", choices=_FORMATS, default="auto", help="how rows are written (default: auto)")
    chat.add_argument("--json", action="store_true", help="answer as JSON")

    add = add_action(actions, "check", _check, "prove that no part of a benchmark is in a training set").add_argument
    add("path", type=Path, help="conversations or text: a file or a folder")
    add("--against", choices=("bfcl",), required=True, help="the benchmark")
    add("--data", type=Path, help="the benchmark's folder bfcl_eval (default: the installed package)")
    add("--ngram", type=positive, default=8, help="words in a row that count as a match (default: 8)")
    add("--field", default="text", help="the field that holds the text, if the rows are not conversations")
    add("--out", type=writable, metavar="FILE", help="also write the report as JSON, to keep with the run")
    add("--kept", type=writable, metavar="FILE", help="write the conversations without a match to this .jsonl")
    add("--json", action="store_true", help="answer as JSON")


def _check(args: argparse.Namespace) -> int:
    """Print what the data and the benchmark have in common; exit code 4 if that is anything."""
    from keepstep.data.chat.files import holds_conversations
    from keepstep.evaluate.bfcl.benchmark import open_benchmark
    from keepstep.evaluate.bfcl.contamination import BenchmarkIndex, check_contamination

    index = BenchmarkIndex(open_benchmark(args.data), args.ngram)
    if args.kept:
        _check_outputs(args.path, [args.kept])
    report = check_contamination(args.path, index, args.field, progress, args.kept)
    written = json.dumps(report, indent=2, ensure_ascii=False)
    if args.out:
        write_atomic(args.out, written + "\n")
    if args.json:
        print(written)
    else:
        print(
            "compared  {rows:,} rows with {questions:,} questions, {functions:,} functions, {answers:,} answers".format(
                **report
            )
        )
        print("found     {contaminated_rows:,} rows with something of {against}".format(**report))
        for match in report["matches"][:20]:
            print("  {row}  {kind} by {by}: {text!r} is in {benchmark_id}".format(**match))
        if report["rejected_rows"]:
            print(f"rejected  {report['rejected_rows']:,} rows that training rejects, too")
        data, is_chat = shlex.quote(str(args.kept or args.path)), holds_conversations(args.path, args.field)
        build = f"keepstep data build {data} --out TOKENS --tokenizer TOKENIZER"
        following = f"keepstep finetune --from MODEL --data {data}" if is_chat else build
        if report["contaminated_rows"] and not args.kept:
            kept = "add --kept CLEAN.jsonl, which gets the other rows"
            following = kept if is_chat else "remove these documents, and check again"
        print(f"next: {following}")
    return EXIT_DATA if report["contaminated_rows"] else EXIT_DONE


def _show(args: argparse.Namespace) -> int:
    """Print rows with the loss mask in colour."""
    from keepstep.data.chat.masks import ShowOptions, show_rows

    if args.tokens and args.tokenizer is None:
        raise UsageError("--tokens needs a tokenizer", "name one with --tokenizer")
    for name in ("rows", "first"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}, but rows are counted from 1", f"--{name} 1")
    options = ShowOptions(
        path=args.path,
        rows=args.rows,
        first=args.first,
        tokenizer=args.tokenizer,
        template=args.template,
        form=args.format,
        loss_on=args.loss_on,
        colour=wants_colour(sys.stdout),
        tokens=args.tokens,
    )
    for line in show_rows(options):
        print(line)
    print(f"next: keepstep finetune --from MODEL --data {shlex.quote(str(args.path))}")
    return 0


def _check_outputs(source: Path, outputs: list[Path]) -> None:
    """Outputs must not be inputs, neither now nor when the command is repeated."""
    for path in outputs:
        if source.exists() and source.resolve() in (path.resolve(), path.resolve().parent):
            raise UsageError(f"{path} would be written where rows are read from ({source})", "name another place")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UsageError(f"--out and --valid-out are both {outputs[0]}", "name two files")


def _held_out_share(args: argparse.Namespace) -> float:
    """The share to hold out; an error if it is invalid or has no file."""
    if args.valid_share is None:
        return 0.05
    if not 0 <= args.valid_share < 1:
        wrong = invalid_value("--valid-share", args.valid_share, "must be at least 0 and below 1")
        raise UsageError(wrong, "0.05 is one in twenty")
    if args.valid_out is None:
        raise UsageError("--valid-share needs a file for the held-out rows", "name one with --valid-out")
    return float(args.valid_share)


def _categories(listed: str | None) -> tuple[str, ...]:
    from keepstep.data.chat.generate import CATEGORIES

    found = tuple(listed.split(",")) if listed else CATEGORIES
    if unknown := [name for name in found if name not in CATEGORIES]:
        raise UsageError(f"--categories: there is no category {unknown[0]!r}", f"choose from {', '.join(CATEGORIES)}")
    return found


def _chat(args: argparse.Namespace) -> int:
    """Convert or generate, and print how many rows were kept and rejected."""
    from keepstep.data.chat.files import frequent_reasons, generated_rows, read_conversations, write_canonical
    from keepstep.data.chat.generated import GENERATED

    share = _held_out_share(args)
    if args.count < 1:
        raise UsageError(invalid_value("--count", args.count, "must be at least 1"), "--count 1000 is the default")
    _check_outputs(Path(args.path), [path for path in (args.out, args.valid_out) if path])
    rows: Any
    if args.path in GENERATED:
        rows = generated_rows(args.path, args.count, args.seed, args.split, _categories(args.categories))
    elif args.categories:
        raise UsageError("--categories is for generated conversations", "use it with toolcalls or toolcalls-domains")
    else:
        rows = read_conversations(Path(args.path), args.format)
    counts, rejects = write_canonical(rows, args.out, args.valid_out, share, args.seed)
    if not counts["kept"] + counts["held_out"]:
        why = f": {rejects} says why" if rejects else ""
        raise DataError(
            f"{args.path} holds no conversation: {counts['rejected']:,} rows were rejected{why}",
            f"known formats are {', '.join(_FORMATS[1:])}; set --format if the keys do not tell which it is",
        )
    if args.json:
        print(json.dumps({**counts, "rejects": str(rejects) if rejects else None}))
        return 0
    held_out = f", {counts['held_out']:,} to {args.valid_out}" if args.valid_out else ""
    print(f"{counts['kept']:,} rows to {args.out}{held_out}")
    if rejects:
        print(f"{counts['rejected']:,} rows rejected, with reasons: {rejects}", *frequent_reasons(rejects), sep="\n  ")
    print(f"next: keepstep data show {shlex.quote(str(args.out))}")
    return 0
