"""What a run prints is for people, and nobody's reason to stop: terminals go away, pipes close, disks fill up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class _Unbreakable:
    """A text stream that drops what cannot be written any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it if that is possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Push it out if that is possible."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """For the length of a run, a stdout or stderr that is gone costs its lines and nothing else."""
    before: tuple[TextIO | None, TextIO | None] = sys.stdout, sys.stderr
    # One that was closed before we started is None, and print() takes that.
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Unbreakable(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], before)
        for stream in before:
            if stream:
                _silence_if_broken(stream)


def _silence_if_broken(stream: TextIO) -> None:
    """Python flushes both once more when it ends, and an error there would replace the run's exit code."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
