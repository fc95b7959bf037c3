"""Load the fast encoder (fastokens) in a thread of its own.

Loading a tokenizer.json takes about as long as all our imports and does not hold the interpreter's lock, so callers
start it first and ask for the result last.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


class FastLoad(threading.Thread):
    """Starts to load when it is created; `result` waits for the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="load-fastokens")
        self._path = path
        self._loaded: Any | None = None
        # Its helper threads spin while they wait, which costs two workers on two cores a third of their time. Without
        # them, a process can also be forked after it has encoded something.
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        self.start()

    def run(self) -> None:
        """Load the encoder."""
        # Not installed, or a tokenizer.json that it does not support: the exact encoder always works.
        with suppress(Exception):
            import fastokens

            self._loaded = fastokens.Tokenizer.from_file(str(self._path))

    def result(self) -> Any | None:
        """A `fastokens.Tokenizer`; None if it cannot be used."""
        self.join()
        return self._loaded
