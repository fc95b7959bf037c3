"""`keepstep models`: the presets, their shapes and their exact parameter counts."""

from __future__ import annotations

import argparse
import json
from typing import Any

from keepstep.config.presets import ALIASES, MISNAMED, PRESETS, preset_fields
from keepstep.config.schema import ModelConfig
from keepstep.core.units import format_count
from keepstep.models.size import parameter_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only the form of the answer."""
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Print one line for each preset."""
    rows = [_row(name) for name in (*PRESETS, *ALIASES)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(_table(rows))
    print("\nnext: keepstep config show model=llama-1b --changed")
    return 0


def _row(name: str) -> dict[str, Any]:
    model = ModelConfig(preset=name, **preset_fields(name, {}))
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
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("layers", "hidden", "heads", "kv_heads", "vocab", "seq_len", "parameters")
    head = ["preset", *columns, ""]
    body = [[row["preset"], *(f"{row[column]:,}" for column in columns), _remark(row)] for row in rows]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]

    def line(cells: list[str]) -> str:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells[1:-1], widths[1:-1], strict=True))
        return "  ".join([f"{cells[0]:<{widths[0]}}", *numbers, cells[-1]]).rstrip()

    return "\n".join(map(line, (head, *body)))


def _remark(row: dict[str, Any]) -> str:
    alias = f", another name for {row['alias_of']}" if row["alias_of"] else ""
    misnamed = ", whatever the name it was published by says" if row["misnamed"] else ""
    return format_count(row["parameters"]) + alias + misnamed
