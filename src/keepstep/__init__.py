"""keepstep: train large language models and lose no step on the way.

The library is imported at the first use of its names: `import keepstep` and the command line stay fast.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["Callback", "Run", "__version__", "data", "load", "train"]

_PLACES = {
    "Callback": ("keepstep.core.callbacks", "Callback"),
    "Run": ("keepstep.library.run", "Run"),
    "load": ("keepstep.library.model", "load"),
    # Folders of the package: `train` can be called, and `data` has `open`.
    "data": ("keepstep.data", ""),
    "train": ("keepstep.train", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    place, attribute = _PLACES[name]
    # Not an import statement: every room imports this package, so the library is named as text.
    module = importlib.import_module(place)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
