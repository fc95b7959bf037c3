#!/usr/bin/env python3
"""Runs the commands of docs/first-hour.md on the text of docs/, offline, and records what a newcomer sees.

    python scripts/record_first_hour.py --steps 100 --svg docs/pictures/first-hour.svg --cast first-hour.cast

The recording is an asciinema cast (version 2), with its times, or a picture of the whole terminal. Needs keepstep.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
PROMPTS = "A checkpoint is\nThe run\n"
COLUMNS = 118
Event = tuple[float, str]


def page_commands() -> list[str]:
    """The lines of the page's sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def shortened(command: str, steps: int) -> str:
    """`keepstep train` with fewer steps and one thread; other commands as they are."""
    if not command.startswith("keepstep train "):
        return command
    interval = max(1, steps // 2)
    intervals = f"evaluate.interval={interval}ba checkpoint.interval={interval}ba"
    return f"{command} max_duration={steps}ba {intervals} schedule.warmup=2ba compute.threads=1"


def words_to_run(command: str) -> list[str]:
    """The command with this Python, which needs no installation."""
    program, *words = shlex.split(command)
    assert program == "keepstep", command
    return [sys.executable, "-m", "keepstep", *words]


def record(folder: Path, steps: int) -> list[Event]:
    """Run every command in the folder; what the terminal shows, with the seconds since the start."""
    (folder / "my-text").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, folder / "my-text")
    (folder / "prompts.txt").write_text(PROMPTS)
    source = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": source, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    started = time.monotonic()
    events: list[Event] = []
    for command in (shortened(command, steps) for command in page_commands()):
        events.append((time.monotonic() - started, f"$ {command}\n"))
        with subprocess.Popen(
            words_to_run(command), cwd=folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as running:  # fmt: skip
            assert running.stdout is not None
            events += [(time.monotonic() - started, line) for line in running.stdout]
        if running.returncode:
            shown = "".join(text for _, text in events)
            sys.exit(f"{shown}\nerror: exit code {running.returncode}: {command}\n hint: fix the command in {PAGE}")
    return events


def cast(events: list[Event]) -> str:
    """The recording in the format of asciinema."""
    header = {"version": 2, "width": COLUMNS, "height": 40, "title": "keepstep: your first hour"}
    lines = [json.dumps(header)]
    lines += [json.dumps([round(at, 3), "o", text.replace("\n", "\r\n")]) for at, text in events]
    return "\n".join(lines) + "\n"


def picture(events: list[Event]) -> str:
    """The whole terminal as an SVG."""
    spec = importlib.util.spec_from_file_location("draw_terminal", ROOT / "docs" / "pictures" / "draw_terminal.py")
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    shown = [f"\x1b[1;32m{text.rstrip()}\x1b[0m\n" if text.startswith("$ ") else text for _, text in events]
    drawn: str = drawing.draw("".join(shown), "your first hour")
    return drawn


def main() -> None:
    """Record, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of training (100)")
    parser.add_argument("--cast", type=Path, help="write an asciinema cast here")
    parser.add_argument("--svg", type=Path, help="write a picture here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        events = record(Path(folder), args.steps)
    if args.cast:
        args.cast.write_text(cast(events))
    if args.svg:
        args.svg.write_text(picture(events))
    if not (args.cast or args.svg):
        sys.stdout.writelines(text for _, text in events)


if __name__ == "__main__":
    main()
