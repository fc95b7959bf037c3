"""What the actions of `keepstep data` share."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.core.units import ByteSize


def add_action(actions: Any, name: str, call: Any, text: str) -> argparse.ArgumentParser:
    """A sub-parser whose `call` is the action's function."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(call=call)
    return parser


def size(text: str) -> int:
    """Bytes from `64MiB`, for argparse."""
    try:
        return ByteSize.parse(text).bytes
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_share(text: str) -> Any:
    """`--task I/N` as a share of the tasks."""
    from keepstep.data.build.run import Share

    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise UsageError(f"--task is {text!r}, but it must be I/N with 0 ≤ I < N", "--task 0/4 is the first of four")
    return Share(int(number), int(of))


def print_build(out: Path, facts: dict[str, Any], *, as_json: bool) -> None:
    """What a build made, and where to go from there."""
    if as_json:
        print(json.dumps({key: value for key, value in facts.items() if key != "files"}))
        return
    print(f"documents {facts['documents']:,}")
    print(f"tokens    {facts['tokens']:,}")
    print(f"files     {len(facts['files']):,} in {out}")
    for title, counts in (("rejected", facts["rejects"]), ("dropped", facts["dropped"])):
        if counts:
            print(f"{title:<9} " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items()))
    if facts["rejects"]:
        print(f"          samples in {out / 'rejects.jsonl'}")
    data = shlex.quote(f"data.path={out}")
    print(f"next: keepstep data inspect {shlex.quote(str(out))}   or   keepstep train run.yaml {data}")
