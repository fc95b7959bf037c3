"""The staging buffer: memory shared with the writer, filled while the next forward and backward run.

On the CPU a thread copies (numpy releases the interpreter lock). On a GPU a side stream copies into pinned memory, at
the full speed of the bus. Training waits only if it reaches its update before the copy is done.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from keepstep.checkpoint.protocol.layout import DTYPES
from keepstep.checkpoint.protocol.shards import PieceSpec
from keepstep.core import failpoints

EAGER_BYTES = 64 * 1024
"""Pieces up to this size are copied immediately: scalars and counters are the most likely to change during a copy."""

CopyPlan = Sequence[tuple[PieceSpec, torch.Tensor]]


class StagingBuffer:
    """One reusable buffer in shared memory."""

    def __init__(self, fd: int | None = None) -> None:
        # memfd, not /dev/shm: containers limit the latter to 64 MiB.
        if fd is not None:
            self.fd = fd
        elif hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("keepstep-staging")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._memory: mmap.mmap | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered = False
        self._copying: threading.Thread | None = None
        self._copied: CopyPlan = ()
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def ensure(self, size_bytes: int, cuda: bool) -> None:
        """Make room for `size_bytes`, resident and, for a GPU, pinned."""
        if self._memory is None or self._buffer.numel() < size_bytes or (cuda and not self._registered):
            self._unregister()
            os.ftruncate(self.fd, max(size_bytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(self.fd, max(size_bytes, mmap.PAGESIZE))
            self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
            # Touch every page now, so that the first save costs as much as later ones.
            self._buffer[:: mmap.PAGESIZE] = 0
            if cuda:
                registered = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), self._buffer.numel(), 0)
                torch.cuda.check_error(registered)
                self._registered = True

    def start(self, plan: CopyPlan, size_bytes: int, done: Callable[[Exception | None], None]) -> None:
        """Start to copy; `done` is called on another thread when the copy is complete or has failed."""
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

        # Keep the tensors alive until `join`: freed memory could be reused while the GPU still reads it.
        self._copied = plan

        self._copying = threading.Thread(target=work, name="checkpoint-copy", daemon=True)
        self._copying.start()

    def before_update(self) -> None:
        """Call before tensors change: on a GPU the next kernels wait for the copy, on a CPU this call waits."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None
        elif self._copying is not None and not self._registered:
            self.join()

    def join(self) -> None:
        """Wait until the copy is done."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
            self._copied = ()

    def close(self) -> None:
        """Release the memory."""
        self.join()
        self._unregister()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._memory = None
        os.close(self.fd)

    def _copy(self, spec: PieceSpec, tensor: torch.Tensor) -> None:
        target = self._buffer[spec.begin : spec.begin + spec.size_bytes]
        if tensor.device.type == "cpu" and tensor.is_contiguous() and spec.tensor_slice.shape:
            np.copyto(target.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
        else:
            target.view(DTYPES[spec.dtype]).view(spec.tensor_slice.shape).copy_(tensor, non_blocking=True)

    def _unregister(self) -> None:
        if self._registered:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
            self._registered = False
