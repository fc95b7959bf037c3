"""The copy aside: memory shared with the writer, filled while the next forward and backward run.

On the CPU a thread copies (numpy lets go of the interpreter lock for that); on a GPU a side stream does, into memory
that is registered with the driver so that it runs at the full speed of the bus. Either way the step waits only if it
gets to its update first.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from keepstep.checkpoint import failpoints
from keepstep.checkpoint.layout import DTYPES
from keepstep.checkpoint.shards import PieceSpec

EAGER_BYTES = 64 * 1024
"""Pieces up to this size are copied at once: scalars and counters are the likeliest to change under a thread."""

CopyPlan = Sequence[tuple[PieceSpec, torch.Tensor]]


class Snapshot:
    """One reusable buffer in shared memory."""

    def __init__(self, handle: int | None = None) -> None:
        # memfd rather than /dev/shm: containers cap the latter at 64 MiB.
        if handle is not None:
            self.handle = handle
        elif hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("keepstep-snapshot")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        self._memory: mmap.mmap | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered = False
        self._copying: threading.Thread | None = None
        self._copied: CopyPlan = ()
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def ensure(self, size_bytes: int, cuda: bool) -> None:
        """Have room for `size_bytes`, resident and, for a GPU, registered with the driver."""
        if self._memory is None or self._buffer.numel() < size_bytes or (cuda and not self._registered):
            self._unregister()
            os.ftruncate(self.handle, max(size_bytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(self.handle, max(size_bytes, mmap.PAGESIZE))
            self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
            # Touch every page now: the first save should cost what the later ones do.
            self._buffer[:: mmap.PAGESIZE] = 0
            if cuda:
                torch.cuda.check_error(
                    _cuda_runtime().cudaHostRegister(self._buffer.data_ptr(), self._buffer.numel(), 0)
                )
                self._registered = True

    def start(self, plan: CopyPlan, size_bytes: int, done: Callable[[Exception | None], None]) -> None:
        """Begin to copy; `done` runs, on another thread, once every byte is in the buffer or the copy has failed."""
        cuda = any(tensor.is_cuda for _, tensor in plan)
        self.ensure(size_bytes, cuda)
        failpoints.reach("copy_started")
        later = []
        if cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for spec, tensor in plan:
                    self._copy(spec, tensor)
            self._event = self._stream.record_event()
        else:
            for spec, tensor in plan:
                if spec.size_bytes <= EAGER_BYTES:
                    self._copy(spec, tensor)
                else:
                    later.append((spec, tensor))

        event = self._event

        def work() -> None:
            try:
                for spec, tensor in later:
                    self._copy(spec, tensor)
                if event is not None:
                    event.synchronize()
            except (RuntimeError, ValueError, OSError) as error:
                done(error)
            else:
                done(None)

        # Keeps the tensors alive until `join`: freed memory could be handed out again while the GPU still reads it.
        self._copied = plan

        self._copying = threading.Thread(target=work, name="checkpoint-copy", daemon=True)
        self._copying.start()

    def before_update(self) -> None:
        """Let nobody change a tensor before it is copied: a GPU's next kernels wait by themselves, a CPU waits here."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None
        elif self._copying is not None and not self._registered:
            self.join()

    def join(self) -> None:
        """Return when the copy is done."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
            self._copied = ()

    def close(self) -> None:
        """Give the memory back."""
        self.join()
        self._unregister()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._memory = None
        os.close(self.handle)

    def _copy(self, spec: PieceSpec, tensor: torch.Tensor) -> None:
        target = self._buffer[spec.begin : spec.begin + spec.size_bytes]
        if tensor.device.type == "cpu" and tensor.is_contiguous() and spec.box.shape:
            np.copyto(target.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
        else:
            target.view(DTYPES[spec.dtype]).view(spec.box.shape).copy_(tensor, non_blocking=True)

    def _unregister(self) -> None:
        if self._registered:
            torch.cuda.check_error(_cuda_runtime().cudaHostUnregister(self._buffer.data_ptr()))
            self._registered = False


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()
