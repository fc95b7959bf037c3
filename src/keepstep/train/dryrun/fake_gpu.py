"""A GPU on fake tensors: kernels that allocate what a GPU's would, and counts of what a step allocates and sends.

A dispatch mode sees every operation below autograd. New storages are counted until they die, resized ones (FSDP frees
and refills its buffers so) are followed, and collectives are counted in the bytes this process puts in or gets out.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keepstep.models.ops.backend import KernelBackend, Pair
from keepstep.parallel.activation_offload import HostBuffers
from keepstep.plan.memory import CHUNK_SHARE

COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
"""Operations that talk to other processes, by the kind of traffic."""


@contextmanager
def replaced(owner: type, name: str, substitute: Any) -> Iterator[None]:
    """Another method of a torch class meanwhile: torch has no hooks at these places."""
    before = getattr(owner, name)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        setattr(owner, name, before)


class StepTrace(TorchDispatchMode):
    """Live and peak bytes of all tensors, and bytes sent by kind of collective. Enter it inside a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_operation = ""
        self.operations = 0
        self.collective_bytes: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a distributed tensor unfold into its local operations, and count those."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        self.operations += 1
        kind = COLLECTIVES.get(func._schema.name) if isinstance(func, torch._ops.OpOverload) else None
        if kind:
            self.collective_bytes[kind] += _largest_bytes(args, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, func)
        return result

    def reset_peak(self) -> None:
        """Forget earlier peaks and traffic: from here on counts."""
        self.peak_bytes, self.peak_operation = self.live_bytes, ""
        self.collective_bytes.clear()

    def _count(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
            self._resize(key, storage.nbytes(), str(func))

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)

    def _resize(self, key: int, size_bytes: int, operation: str) -> None:
        self.live_bytes += size_bytes - self._sizes[key]
        self._sizes[key] = size_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operation = self.live_bytes, operation

    @contextmanager
    def following(self) -> Iterator[StepTrace]:
        """Count operations, and storages that are resized past the dispatcher."""
        resize = torch.UntypedStorage.resize_
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes and not self._paused:
                self._resize(storage._cdata, storage.nbytes(), "resize")
            return result

        # DTensor finds result shapes by running the operation on whole fake tensors: nothing that a run would do.
        def unseen(propagator: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                return infer(propagator, *args, **kwargs)
            finally:
                self._paused = before

        allocate = HostBuffers.allocate

        # Host memory is none of the device's: it is known with a size of 0.
        def uncounted(buffers: HostBuffers, *args: Any) -> Tensor:
            before, self._paused = self._paused, True
            buffer = allocate(buffers, *args)
            self._paused = before
            self._sizes[buffer.untyped_storage()._cdata] = 0
            return buffer

        with (
            replaced(HostBuffers, "allocate", uncounted),
            replaced(torch.UntypedStorage, "resize_", followed),
            replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
            self,
        ):
            yield self


def _largest_bytes(*values: Any) -> int:
    sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return max(sizes, default=0)


class _FusedRMSNorm(torch.autograd.Function):
    """Saves what the GPU's fused kernel saves: input, weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inverse = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _inverse = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class GpuOnFakeTensors(KernelBackend):
    """Stands in for kernels that a GPU has and a CPU splits into several operators."""

    def __init__(self, device_bytes: int) -> None:
        self._device_bytes = device_bytes

    def has_kernels(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """As on a GPU."""
        return True

    has_cross_entropy = has_cross_entropy_fp8 = has_adamw = has_muon = has_grouped_matmul = has_kernels

    def row_counts(self, counts_sp: Tensor, rows: int) -> list[list[int]]:
        """As even as can be: tensors without data have no routes."""
        even, more = divmod(rows, counts_sp.shape[1])
        return [[even + (process < more) for process in range(counts_sp.shape[1])]] * 2

    def cross_entropy_(self, logits_nv: Tensor, targets_n: Tensor, vocab: int, with_gradient: bool) -> Tensor:  # noqa: ARG002
        """Allocates the losses; the logits' memory becomes that of their gradient."""
        return torch.empty(logits_nv.shape[0], dtype=torch.float32, device=logits_nv.device)

    def cross_entropy_fp8(self, logits_nv: Tensor, targets_n: Tensor, vocab: int, exponent: int) -> Pair:  # noqa: ARG002
        """Allocates the losses and the gradient."""
        losses_n = torch.empty(logits_nv.shape[0], dtype=torch.float32, device=logits_nv.device)
        return losses_n, torch.empty_like(logits_nv, dtype=torch.float8_e5m2)

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """In place."""
        tensor.mul_(factor)

    def chunk_bytes(self, logits: Tensor) -> int:  # noqa: ARG002
        """The share of the planned device's memory."""
        return self._device_bytes // CHUNK_SHARE

    def add_matmul_(self, total_vd: Tensor, left_vn: Tensor, right_nd: Tensor) -> None:  # noqa: ARG002
        """In place, without a result of its own."""
        total_vd.zero_()

    def adamw_(self, halves: Pair, gradient: Tensor, moments: Pair, factor: Tensor, **settings: Any) -> None:
        """Allocates nothing."""

    def momentum_(self, gradient: Tensor, momentum: Tensor, factor: Tensor, beta: float) -> Tensor:  # noqa: ARG002
        """Allocates the direction."""
        return torch.empty_like(gradient, dtype=torch.bfloat16)

    def add_direction_(self, halves: Pair, direction: Tensor, factor: Tensor, keep: float, step: float) -> None:
        """Allocates nothing."""

    def add_fixed_point_(self, total: Tensor, gradient: Tensor, largest: Tensor, scale: float, first: bool) -> None:
        """A kernel adds in one pass, without a wider copy of the gradient."""

    def is_finite(self, scalar: Tensor) -> bool:  # noqa: ARG002
        """Tensors without data are taken to be finite."""
        return True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ARG002
        """One kernel."""
        apply: Callable[..., Tensor] = _FusedRMSNorm.apply
        return apply(x, weight)
