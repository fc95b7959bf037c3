"""Whether fused kernels can be compiled on this machine."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Triton is installed; whether a tensor is on a GPU is the caller's to ask."""
    return importlib.util.find_spec("triton") is not None
