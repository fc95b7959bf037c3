"""`keepstep config`: what a run's settings are, whether they are sound, and what there is to set."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from keepstep.config.load import load_config, split_words
from keepstep.core.errors import ConfigError, UsageError

_ACTIONS = {
    "show": "print the effective settings and where each came from",
    "check": "report everything that is wrong, and nothing else",
    "reference": "print the reference of all settings, or of the sections and fields named",
    "schema": "print JSON Schema for editors",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and the words `keepstep train` would get."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"  {name:<10} {text}" for name, text in _ACTIONS.items())
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do, see below")
    parser.add_argument("words", nargs="*", help="run.yaml and section.field=value words, as for keepstep train")
    parser.add_argument("--json", action="store_true", help="show, check: answer as JSON")
    parser.add_argument("--changed", action="store_true", help="show: leave out what is at its default")


def run(args: argparse.Namespace) -> int:
    """Do one of the actions."""
    match args.action:
        case "show":
            return _show(args)
        case "check":
            return _check(args)
        case "reference":
            return _reference(args)
        case _:
            return _schema(args)


def _show(args: argparse.Namespace) -> int:
    from keepstep.config.show import show_as_json, show_config

    loaded = load_config(*split_words(args.words))
    print(json.dumps(show_as_json(loaded, args.changed), indent=2) if args.json else show_config(loaded, args.changed))
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        loaded = load_config(*split_words(args.words))
    except ConfigError as error:
        if not args.json:
            raise
        problems = [{"problem": problem.message, "hint": problem.hint} for problem in error.problems]
        print(json.dumps({"sound": False, "problems": problems}, indent=2))
        return error.exit_code
    if args.json:
        print(json.dumps({"sound": True, "problems": []}, indent=2))
        return 0
    given = sum(origin.kind not in ("default", "preset") for origin in loaded.origins.values())
    print(f"sound: run {loaded.config.name}, model {loaded.config.model.preset}, settings given: {given}")
    print(f"next: {shlex.join(['keepstep', 'train', *args.words])}", file=sys.stderr)
    return 0


def _reference(args: argparse.Namespace) -> int:
    from keepstep.config.reference import reference_of, reference_page

    print(reference_of(args.words) if args.words else reference_page(), end="")
    return 0


def _schema(args: argparse.Namespace) -> int:
    from keepstep.config.jsonschema import json_schema

    if args.words:
        raise UsageError(f"keepstep config schema takes no words, not {args.words[0]!r}", "it describes every run.yaml")
    print(json.dumps(json_schema(), indent=2))
    return 0
