"""`keepstep new NAME`: a commented run.yaml to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.config.load import load_config
from keepstep.config.template import run_yaml
from keepstep.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("name", help="the run's name; the file becomes NAME/run.yaml")


def run(args: argparse.Namespace) -> int:
    """Write the file, never over one that is there."""
    # A name that no run could have must not leave a file behind.
    load_config(None, [f"name={args.name}"])
    path = Path(args.name) / "run.yaml"
    if path.exists():
        raise UsageError(f"{path} is there already", "choose another name, or edit that file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_yaml(args.name, str(path)))
    print(f"wrote {path}")
    print(f"next: keepstep train {path}")
    return 0
