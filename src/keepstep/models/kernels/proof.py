"""Kernels must prove themselves on the GPU at hand before they are used."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from keepstep.models.kernels.cuda import CudaError

_AGREED = 0.01
"""Both sides of a proof round to bf16, which is 0.004."""

_log = logging.getLogger(__name__)

Proof = Callable[[torch.device], float]


@functools.cache
def works(name: str, device: torch.device, proof: Proof) -> bool:
    """Whether kernels run on a GPU, and right; asked once.

    `proof` computes something small with them and in torch's own operators, and gives the largest relative difference.
    A compiler or driver that nobody has met yet costs speed then, and nothing else.
    """
    try:
        # The question may come from a tracer, whose tensors have no numbers.
        with _disable_current_modes(), torch.cuda.device(device):
            difference = proof(device)
    except (CudaError, OSError) as error:
        _log.warning("%s does without its kernels: %s", name, error)
        return False
    if not difference < _AGREED:
        _log.warning("%s does without its kernels: they are off by %.2g", name, difference)
    return difference < _AGREED


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of the pair of tensors that differ most; NaN where one has a NaN."""
    pairs = zip(ours, theirs, strict=True)
    parts = [(one.float() - other.float()).norm() / other.float().norm() for one, other in pairs]
    return torch.stack(parts).max().item()
