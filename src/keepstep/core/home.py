"""Where a user's own files are, also for one that the machine does not know."""

from __future__ import annotations

import os
from pathlib import Path


def home_folder() -> Path:
    """The user's home; `/`, as container runtimes have it, for a number without a name, a home or a HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/keepstep`, or the same below the home folder. It may be none that can be written to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "keepstep"
