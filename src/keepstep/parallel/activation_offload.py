"""Activation offloading: what blocks save for the backward pass waits in host memory.

A block's tensors are copied while the next block computes, and leave the device when that one is done. In the backward
pass they are copied back one block ahead. All copies run on one side stream, in order, so a host buffer can be used
again immediately. The compute stream waits for a copy before memory that it reads or writes is freed; the host never
waits. On a CPU the same code copies from memory to memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from keepstep.models.attention_context import Context

MIN_BYTES = 2**20
"""Smaller tensors stay on the device: copying them costs more than it saves."""
_UNIT_BYTES = 2**16


class ActivationOffload:
    """Moves what the blocks of one model, or of one pipeline stage, save to host memory and back."""

    def __init__(self) -> None:
        self._copies: _CopyStream | None = None
        self._recording: _SavedBlock | None = None
        self._newest: _SavedBlock | None = None
        """The block whose tensors are still on the device, whether copied or not."""
        self.buffers = HostBuffers()

    def wrap(self, block: nn.Module, *, is_first: bool, stays: bool) -> None:
        """Offload what this block saves, in place. `is_first` starts a pass through the blocks.

        With `stays` its tensors stay on the device, because its backward pass comes next.
        """
        forward = block.forward

        def offloaded(x_btd: Tensor, context: Context, *args: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(x_btd, context, *args)
            before = None if is_first else self._newest
            saved = self._recording = _SavedBlock(block, context, x_btd.device, before, stays)
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    outputs = forward(x_btd, context, *args)
            finally:
                self._recording = None
            self._finish(saved)
            return outputs

        block.forward = offloaded

    def save_outputs(self, names: tuple[str, ...]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts for torch's `checkpoint`: the outputs of these operators are offloaded, and not computed again.

        Torch's own contexts keep them outside of autograd, where `saved_tensors_hooks` does not see them.
        """
        outputs: deque[Any] = deque()
        return _SaveOutputs(self, names, outputs), _ReuseOutputs(self, names, outputs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: Tensor) -> Tensor | _SavedView:
        saved = self._recording
        assert saved is not None
        # A distributed tensor has no storage of its own.
        if isinstance(tensor, DTensor) or tensor.device != saved.device or tensor.layout != torch.strided:
            return tensor
        if tensor.untyped_storage().nbytes() < MIN_BYTES:
            return tensor
        copy = saved.copy_of(tensor)
        if copy is None:
            return tensor
        offset = int(tensor.storage_offset())
        return _SavedView(copy, saved, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpack(self, packed: Tensor | _SavedView) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved = packed.block
        self._fetch(saved)
        # One block ahead: its tensors travel while this block computes.
        if saved.previous is not None:
            self._fetch(saved.previous)
            saved.previous = None
        saved.wait()
        return packed.restore()

    def _finish(self, saved: _SavedBlock) -> None:
        """Start copying what a block has saved, and free what the block before it has."""
        if not saved.stays:
            if self._copies is None:
                self._copies = _CopyStream(saved.device)
            moving = [copy for copy in saved.living_copies() if copy.host is None]
            for copy in moving:
                copy.host = self.buffers.take(copy.size_bytes, saved.device)
                copy.buffers = self.buffers
            saved.copied = self._copies.start([pair for copy in moving for pair in copy.pieces()])
        if self._newest is not None:
            self._newest.leave_device()
        self._newest = saved

    def _fetch(self, saved: _SavedBlock) -> None:
        """Start bringing back what has left the device."""
        absent = [copy for copy in saved.living_copies() if copy.device is None]
        if not absent:
            return
        assert self._copies is not None
        for copy in absent:
            copy.fetched_for = saved
            copy.device = torch.empty(copy.size_bytes, dtype=torch.uint8, device=saved.device)
        pieces = [piece for copy in absent for piece in copy.pieces()]
        saved.fetched = self._copies.start([(on_device, in_host) for in_host, on_device in pieces])


class HostBuffers:
    """Host memory for copies, kept for the next step: allocating pinned memory stops the device."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self.size_bytes = self.peak_bytes = 0
        """In use now, and at most so far."""

    def take(self, size_bytes: int, device: torch.device) -> list[Tensor]:
        """Buffers for this many bytes, largest first.

        Each is a power of two, because torch allocates pinned memory so: a single one could be half empty.
        """
        sizes = buffer_sizes(size_bytes)
        self.size_bytes += sum(sizes)
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        free = [self._free.setdefault(size, []) for size in sizes]
        return [each.pop() if each else self.allocate(size, device) for size, each in zip(sizes, free, strict=True)]

    def allocate(self, size_bytes: int, device: torch.device) -> Tensor:
        """A new buffer, which a GPU can copy to while it computes."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Take buffers back. Copies that still use them precede those of their next user on their stream."""
        for buffer in buffers:
            self._free[buffer.numel()].append(buffer)
            self.size_bytes -= buffer.numel()


def buffer_sizes(size_bytes: int) -> list[int]:
    """The powers of two that add up to a size, rounded up to 64 KiB; largest first."""
    units = -(-size_bytes // _UNIT_BYTES)
    return [_UNIT_BYTES << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


class _CopyStream:
    """The side stream on which copies run in order; on a CPU they run immediately."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy the second of each pair into the first, after all work that the device has; returns when it is done."""
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = self._stream.record_event()
        return done


class _SavedBlock:
    """What one block saved in one pass."""

    def __init__(
        self, module: nn.Module, context: Context, device: torch.device, previous: _SavedBlock | None, stays: bool
    ) -> None:
        self.device, self.stays = device, stays
        self.previous = previous
        """The block before it, whose backward pass comes after."""
        self.copied: torch.cuda.Event | None = None
        """When all tensors are in host memory."""
        self.fetched: torch.cuda.Event | None = None
        """When all are back; None where the compute stream has already waited for that."""
        self._module = module
        self._shared = {_storage_key(tensor) for tensor in _tensors_in(context)}
        # Weak: a copy must go with the last autograd node that needs it, not with the block.
        self._copies: dict[int, weakref.ref[_Copy]] = {}

    def copy_of(self, tensor: Tensor) -> _Copy | None:
        """The one copy of a storage, however many views of it are saved; None for weights and what blocks share."""
        key = _storage_key(tensor)
        copy = self._copy_on_device(key)
        if copy is None and (key in self._shared or key in self._weight_keys()):
            return None
        # The residual stream may be saved by the block before as well.
        if copy is None and self.previous is not None and not self.stays:
            copy = self.previous._copy_on_device(key)
        if copy is None:
            numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
            copy = _Copy(tensor.detach().as_strided((numbers,), (1,), 0).view(torch.uint8))
        self._copies[key] = weakref.ref(copy)
        return copy

    def _copy_on_device(self, key: int) -> _Copy | None:
        """The copy of this storage; None once it has left the device, where another tensor may have its key now."""
        known = self._copies.get(key)
        copy = None if known is None else known()
        return copy if copy is not None and copy.device is not None else None

    def living_copies(self) -> list[_Copy]:
        """Those that a backward pass still needs."""
        return [copy for known in self._copies.values() if (copy := known()) is not None]

    def leave_device(self) -> None:
        """Free the device's memory, once it has been copied."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        for copy in self.living_copies():
            if copy.host is not None:
                copy.device = None

    def wait(self) -> None:
        """Let the compute stream wait until all tensors are back."""
        if self.fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(self.fetched)
            self.fetched = None

    def _weight_keys(self) -> Iterator[int]:
        # Not known before: FSDP gathers the weights of experts during the block.
        for weight in (*self._module.parameters(), *self._module.buffers()):
            yield _storage_key(weight._local_tensor if isinstance(weight, DTensor) else weight)


class _Copy:
    """The bytes of one storage: on the device, in host memory, or both."""

    __slots__ = ("__weakref__", "buffers", "device", "fetched_for", "host", "size_bytes")

    def __init__(self, device: Tensor) -> None:
        self.device: Tensor | None = device
        self.host: list[Tensor] | None = None
        self.buffers: HostBuffers | None = None
        self.fetched_for: _SavedBlock | None = None
        self.size_bytes = device.numel()

    @property
    def on_device(self) -> Tensor:
        """All its bytes on the device."""
        assert self.device is not None
        return self.device

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Its bytes in host memory and on the device, buffer by buffer."""
        start = 0
        for buffer in self.host or ():
            on_device = self.on_device[start : start + buffer.numel()]
            yield buffer[: on_device.numel()], on_device
            start += buffer.numel()

    def __del__(self) -> None:
        # A pass that is given up may free memory that a copy on the side stream is about to write.
        if self.fetched_for is not None:
            self.fetched_for.wait()
        if self.host is not None and self.buffers is not None:
            self.buffers.give_back(self.host)


@dataclass(frozen=True)
class _SavedView:
    """What autograd holds in place of a tensor."""

    copy: _Copy
    block: _SavedBlock
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        """The tensor, over the memory that its copy has on the device."""
        return self.copy.on_device.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class _OutputMode(TorchDispatchMode):
    def __init__(self, offload: ActivationOffload, names: tuple[str, ...], outputs: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._offload, self._names, self._outputs = offload, names, outputs

    def _is_saved(self, operator: Any) -> bool:
        return operator.name().split(".")[0] in self._names


class _SaveOutputs(_OutputMode):
    """In forward: what these operators return is packed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._is_saved(func):
            # Detached: the graph must not hold itself.
            self._outputs.append(tree_map_only(Tensor, lambda each: self._offload._pack(each.detach()), output))
        return output


class _ReuseOutputs(_OutputMode):
    """In recomputation: it is unpacked in place of running them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_saved(func):
            return func(*args, **(kwargs or {}))
        return tree_map_only((Tensor, _SavedView), self._offload._unpack, self._outputs.popleft())


def _storage_key(tensor: Tensor) -> int:
    """The same for all views of one storage, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a context: masks, rope tables, bounds of documents."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, Context):
        for kind in type(value).__mro__:
            for name in getattr(kind, "__slots__", ()):
                yield from _tensors_in(getattr(value, name))
