"""Which kernels a run computes with, where the configuration has a say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepstep.config.layout import Layout
from keepstep.config.schema import RunConfig
from keepstep.core.errors import HardwareError
from keepstep.models.documents import flash_takes
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


def attends_by_bounds(config: RunConfig, layout: Layout, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention is told where documents start, in place of a mask; an error where flash was asked in vain."""
    kernel, head_size = config.compute.attention, config.model.head_size
    if kernel not in ("auto", "flash"):
        return False
    takes = flash_takes(device, dtype, head_size)
    if kernel == "flash" and device.type == "cuda" and not takes:
        number, gpu = str(dtype).removeprefix("torch."), torch.cuda.get_device_name(device)
        raise HardwareError(
            f"compute.attention is flash, which {gpu} cannot compute with heads of {head_size} in {number}",
            "compute.attention=auto; flash takes heads of 8, 16, 24 to 256 in bf16 or fp16, on Ampere GPUs or newer",
        )
    # The kernel's backward pass knows no ALiBi; a ring and a pipeline have masks of their own.
    whole = layout.context == 1 and layout.pipeline == 1 and config.model.positions != "alibi"
    # Where there is no GPU at all, flash means bounds without the kernel.
    return whole and (takes or kernel == "flash")
