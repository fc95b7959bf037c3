"""Which kernels a run computes with, where the configuration has a say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from keepstep.config.schema import RunConfig
from keepstep.train.exact import repeatable_kernels

_ATTENTION = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@contextmanager
def chosen_kernels(config: RunConfig) -> Iterator[None]:
    """Attention and repeatability as configured; to be entered before a GPU is first used."""
    with ExitStack() as choices:
        choices.enter_context(repeatable_kernels(config.reproducible == "elastic"))
        if config.compute.attention != "auto":
            choices.enter_context(sdpa_kernel(_ATTENTION[config.compute.attention]))
        yield
