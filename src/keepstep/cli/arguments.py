"""Words of the command line that several verbs take, checked where they are read."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from keepstep.core.errors import UsageError


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return number


def read_text(path: Path, flag: str) -> str:
    """The text of a file that `flag` names."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}", "check the path") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def check_place(path: Path | None) -> None:
    """Raise where nothing can be written, before hours of work are there to be lost."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file in a folder of yours") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written", "name a file in a folder of yours")
