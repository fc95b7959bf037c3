"""`keepstep data show` and `keepstep data chat`: look at conversations as a model sees them, and convert them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from keepstep.cli.data_common import add_action
from keepstep.core.errors import DataError, UsageError

LOSS_ON = ("assistant", "tool_calls", "all")
FORMATS = ("auto", "messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca")


def add_actions(actions: Any) -> None:
    """`show` and `chat`, among the actions of `keepstep data`."""
    _add_show_arguments(add_action(actions, "show", run_show, "show conversations as a model sees them"))
    _add_chat_arguments(add_action(actions, "chat", run_chat, "turn conversations into canonical rows, or make some"))


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="conversations (.jsonl, .json, .parquet, a folder of them), or toolcalls")
    parser.add_argument("--rows", type=int, default=3, help="rows to show (default: 3)")
    parser.add_argument("--first", type=int, default=1, help="number of the first row (default: 1)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; its folder's chat template is used")
    parser.add_argument("--template", default="", help="a jinja2 chat template instead")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="how rows are written (default: auto)")
    parser.add_argument(
        "--loss-on", choices=("assistant", "tool_calls", "all"), default="assistant", help="what is learnt"
    )
    parser.add_argument("--tokens", action="store_true", help="show where tokens end; needs --tokenizer")


def run_show(args: argparse.Namespace) -> int:
    """Print rows with the mask in colour."""
    from keepstep.data.chat_show import ShowOptions, show_rows

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
        colour=wants_colour(),
        tokens=args.tokens,
    )
    for line in show_rows(options):
        print(line)
    print(f"next: keepstep finetune --from MODEL --data {shlex.quote(str(args.path))}")
    return 0


def wants_colour() -> bool:
    """Colour on a terminal, or where FORCE_COLOR asks for it; never with NO_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="conversations in any known format, or toolcalls to generate them")
    parser.add_argument("--out", type=Path, required=True, help="canonical .jsonl to write")
    parser.add_argument("--valid-out", type=Path, help="write the held-out share here")
    parser.add_argument("--valid-share", type=float, help="share held out for --valid-out (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, and of generated rows")
    parser.add_argument("--count", type=int, default=1000, help="rows to generate (default: 1000)")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="functions to generate from")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="how rows are written (default: auto)")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def _check_outputs(source: Path, outputs: list[Path]) -> None:
    """What is written must not be what is read, now or when the command is given again."""
    for path in outputs:
        if source.exists() and source.resolve() in (path.resolve(), path.resolve().parent):
            raise UsageError(f"{path} would be written where rows are read from ({source})", "name another place")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UsageError(f"--out and --valid-out are both {outputs[0]}", "name two files")


def _held_out_share(args: argparse.Namespace) -> float:
    """The share to hold out; an error where it means nothing."""
    if args.valid_share is None:
        return 0.05
    if not 0 <= args.valid_share < 1:
        raise UsageError(
            f"--valid-share is {args.valid_share}, but it must be at least 0 and below 1", "0.05 is one in twenty"
        )
    if args.valid_out is None:
        raise UsageError("--valid-share holds rows out, and nothing says where they go", "name a file with --valid-out")
    return float(args.valid_share)


def run_chat(args: argparse.Namespace) -> int:
    """Convert or generate, and say what became of every row."""
    from keepstep.data.chat_files import NumberedRow, read_conversations, write_canonical
    from keepstep.data.chat_generate import generate_rows

    share = _held_out_share(args)
    if args.count < 1:
        raise UsageError(f"--count is {args.count}, but at least one row is generated", "--count 1000 is the default")
    _check_outputs(Path(args.path), [path for path in (args.out, args.valid_out) if path])
    if args.path == "toolcalls":
        made = generate_rows(args.count, args.seed, args.split)
        rows = (NumberedRow("toolcalls", number, row.conversation) for number, row in enumerate(made, start=1))
        written = write_canonical(rows, args.out, args.valid_out, share, args.seed)
    else:
        found = read_conversations(Path(args.path), args.format)
        written = write_canonical(found, args.out, args.valid_out, share, args.seed)
    if not written.kept + written.held_out:
        why = f": {written.rejects} says why" if written.rejects else ""
        raise DataError(
            f"{args.path} holds no conversation: {written.rejected:,} rows were refused{why}",
            f"rows are {', '.join(FORMATS[1:])}; --format names what their keys do not tell",
        )
    facts = {"kept": written.kept, "held_out": written.held_out, "rejected": written.rejected}
    if args.json:
        print(json.dumps({**facts, "rejects": str(written.rejects) if written.rejects else None}))
        return 0
    print(
        f"{written.kept:,} rows to {args.out}"
        + (f", {written.held_out:,} to {args.valid_out}" if args.valid_out else "")
    )
    if written.rejects:
        print(f"{written.rejected:,} rows refused, with reasons: {written.rejects}")
    print(f"next: keepstep data show {shlex.quote(str(args.out))}")
    return 0
