"""From raw text to an exact stream of tokens. Order is pure; only the loader does I/O."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # `open` reads the data of a run.yaml. It is above this room, which must not import it.
    if name == "open":
        return importlib.import_module("keepstep.library.data_stream").open_stream
    raise AttributeError(f"module 'keepstep.data' has no attribute {name!r}")
