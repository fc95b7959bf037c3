from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep import data as data
from keepstep.core.callbacks import Callback as Callback
from keepstep.library.model import load as load
from keepstep.library.run import Run as Run

__version__: str

def train(
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    processes: int | str = "auto",
    quiet: bool = False,
    **fields: Any,
) -> Run: ...
