"""How much a command prints on stderr: `-q` only warnings and errors, `-v` also debug lines.

The choice is an environment variable, so that workers and other processes of the command follow it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

VARIABLE = "KEEPSTEP_VERBOSITY"
_ALWAYS = ("error:", "warning:", "notice:", "fault:", " hint:")
"""How lines begin that are printed with -q, too."""


def is_verbose() -> bool:
    """Whether debug lines are wanted."""
    return os.environ.get(VARIABLE) == "verbose"


def is_shown(text: str) -> bool:
    """Whether to print a line on stderr; with -q, only a warning, a notice or an error."""
    return os.environ.get(VARIABLE) != "quiet" or text.startswith(_ALWAYS)


def progress(text: str) -> None:
    """Print a line about what the command does; with -q, nothing."""
    if is_shown(text):
        print(text, file=sys.stderr, flush=True)


def debug(text: str) -> None:
    """With -v, print a detail; a run has it in its logs, too."""
    if not is_verbose():
        return
    rank = f" [rank {os.environ['RANK']}]" if "RANK" in os.environ else ""
    print(f"debug: {time.strftime('%H:%M:%S')}{rank} {text}", file=sys.stderr, flush=True)
    # A short command answers before `logging` is imported.
    if "logging" in sys.modules:
        sys.modules["logging"].getLogger("keepstep").debug(text)


@contextmanager
def verbosity(chosen: Literal["quiet", "verbose"] | None) -> Iterator[None]:
    """Inside this block, print as `chosen`; None keeps the choice of the process that started this one."""
    before = os.environ.get(VARIABLE)
    if chosen is not None:
        os.environ[VARIABLE] = chosen
    try:
        yield
    except Exception:
        if is_verbose():
            # Without -v, the user sees only the message and its hint.
            import traceback

            debug(f"the error was raised here:\n{traceback.format_exc().rstrip()}")
        raise
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
