"""`keepstep config`, `new` and `models`: show, check and document settings; a run.yaml and presets to start from."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from keepstep.cli.parser import CONFIG_HELP, add_action, add_actions
from keepstep.config.load import load_config, split_words
from keepstep.config.presets import ALIASES, MISNAMED, PRESETS, preset_fields
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError, UsageError
from keepstep.core.terminal import align
from keepstep.core.units import format_count
from keepstep.core.verbosity import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = add_actions(parser)
    show = add_action(actions, "show", _show, "print the effective settings and where each came from")
    show.add_argument("--changed", action="store_true", help="leave out settings at their default")
    check = add_action(actions, "check", _check, "report everything that is wrong with a configuration")
    for action in (show, check):
        action.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help=CONFIG_HELP)
        action.add_argument("--json", action="store_true", help="print JSON")
    reference = add_action(actions, "reference", _reference, "print the reference of all settings")
    reference.add_argument("words", nargs="*", metavar="SECTION[.FIELD]", help="only these sections and fields")
    add_action(actions, "schema", _schema, "print the JSON Schema of run.yaml, for editors")


def add_new(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep new`."""
    parser.add_argument("name", help="the run's name, or a path that ends in it; the file is NAME/run.yaml")
    parser.set_defaults(call=_new)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Options of `keepstep models`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=_models)


def _show(args: argparse.Namespace) -> int:
    from keepstep.config.dump import show_as_json, show_config

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
    progress(f"next: {shlex.join(['keepstep', 'train', *args.words])}")
    return 0


def _reference(args: argparse.Namespace) -> int:
    from keepstep.config.reference import reference_of, reference_page

    print(reference_of(args.words) if args.words else reference_page(), end="")
    return 0


def _schema(_: argparse.Namespace) -> int:
    from keepstep.config.reference import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _new(args: argparse.Namespace) -> int:
    """Write the file; an existing one is never overwritten."""
    from keepstep.config.dump import run_yaml

    # First, so that an invalid name leaves no file behind.
    name = Path(args.name).resolve().name
    load_config(None, [f"name={name}"])
    path = Path(args.name) / "run.yaml"
    if path.exists():
        raise UsageError(f"{path} already exists", "choose another name, or edit that file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_yaml(name, str(path)))
    print(f"wrote {path}")
    print(f"next: keepstep train {path}")
    return 0


def _models(args: argparse.Namespace) -> int:
    rows = [_row(name) for name in (*PRESETS, *ALIASES)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    columns = ("layers", "hidden", "heads", "kv_heads", "vocab", "seq_len", "parameters")
    head = ["preset", *columns, ""]
    body = [[row["preset"], *(f"{row[column]:,}" for column in columns), _remark(row)] for row in rows]
    print("\n".join(align([head, *body], right=range(1, len(head) - 1))))
    print("\nnext: keepstep config show model=llama-1b --changed")
    return 0


def _row(name: str) -> dict[str, Any]:
    from keepstep.models.size import active_parameters, parameter_count

    model = ModelConfig(preset=name, **preset_fields(name))
    return {
        "preset": name,
        "alias_of": ALIASES.get(name),
        "misnamed": name in MISNAMED,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.key_value_heads,
        "ffn_hidden": model.ffn_size,
        "vocab": model.vocab,
        "seq_len": model.seq_len,
        "parameters": parameter_count(model),
        "active_parameters": active_parameters(model),
    }


def _remark(row: dict[str, Any]) -> str:
    alias = f", another name for {row['alias_of']}" if row["alias_of"] else ""
    misnamed = ", not the size in its published name" if row["misnamed"] else ""
    active = row["active_parameters"]
    experts = f", {format_count(active)} active" if active < row["parameters"] else ""
    return format_count(row["parameters"]) + experts + alias + misnamed
