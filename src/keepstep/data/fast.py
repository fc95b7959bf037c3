"""The fast encoder, loaded in a thread of its own.

Reading a tokenizer.json takes it about as long as all our imports and leaves the interpreter free, so whoever will need
it starts it first and asks for it last.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any


class FastLoad(threading.Thread):
    """Starts loading when it is made; `result` waits for the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="load-fastokens")
        self._path = path
        self._loaded: Any | None = None
        # Its helper threads spin while they wait: two workers on two cores lose a third of both to them. A process
        # without them may also be forked after it has encoded something.
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        self.start()

    def run(self) -> None:
        """The thread's work."""
        try:
            import fastokens

            self._loaded = fastokens.Tokenizer.from_file(str(self._path))
        except Exception:  # not installed, or a tokenizer.json of a kind it refuses: the exact way always works
            self._loaded = None

    def result(self) -> Any | None:
        """A `fastokens.Tokenizer`; None where it cannot be used."""
        self.join()
        return self._loaded
