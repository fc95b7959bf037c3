"""How many processes this machine should run: found without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.core.errors import UsageError

_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> int:
    """GPUs that a process started here would see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([word for word in chosen.split(",") if word.strip() not in ("", "-1")])
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def process_count(wanted: str, device: str) -> int:
    """`auto` is one a GPU, or one where there is none."""
    if wanted == "auto":
        return 1 if device == "cpu" else max(1, visible_gpus())
    if not wanted.isdigit() or int(wanted) < 1:
        raise UsageError(f"--procs is {wanted!r}, but it must be auto or a whole number from 1", "--procs 2")
    return int(wanted)
