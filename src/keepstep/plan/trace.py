"""Count what a step allocates and sends, on fake tensors: no memory is taken and nothing is sent.

A dispatch mode sees every operation below autograd. New storages are counted until they die, resized ones (FSDP frees
and refills its buffers so) are followed, and collectives are counted in the bytes this process puts in or gets out.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keepstep.models import attention, head
from keepstep.models.mlp import GatedMLP
from keepstep.models.swiglu import swiglu
from keepstep.parallel import vocabulary
from keepstep.plan.memory import PIECE_SHARE

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
        """Count operations, and what happens to storages behind the dispatcher's back."""
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

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", followed))
            stack.enter_context(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
            stack.enter_context(self)
            yield self


def _largest_bytes(*values: Any) -> int:
    sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return max(sizes, default=0)


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps what the GPU's fused kernel keeps: input, weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inverse = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _inverse = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def gpu_kernels(device_bytes: int) -> Iterator[None]:
    """Stand in for kernels that a GPU has and a CPU takes apart: only what they keep and allocate matters here."""

    def fused_norm(x: Tensor, _shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        del eps
        ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight
        apply: Callable[..., Tensor] = _FusedRMSNorm.apply
        return apply(x, ones)

    def fused_loss(logits_nv: Tensor, _targets_n: Tensor, _vocab: int, with_gradient: bool) -> Tensor:
        del with_gradient
        return torch.empty(logits_nv.shape[0], dtype=torch.float32, device=logits_nv.device)

    # A function, not a mock: that remembers what it was called with, and keeps it alive.
    def there_is_one(_tensor: Tensor) -> bool:
        return True

    def pieces(tokens: int, rows: int, logits: Tensor) -> int:
        return max(1, min(tokens, -(-tokens * rows * logits.element_size() // (device_bytes // PIECE_SHARE))))

    def add_in_place(total: head._WeightSum, _left: Tensor, _right: Tensor) -> None:
        total.total_vd.zero_()

    with ExitStack() as stack:
        kernels = {
            "keepstep.models.kernels.cross_entropy": SimpleNamespace(cross_entropy_=fused_loss, scale_=Tensor.mul_)
        }
        stack.enter_context(mock.patch.dict(sys.modules, kernels))
        stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", fused_norm))
        stack.enter_context(mock.patch.object(head, "_fused", there_is_one))
        stack.enter_context(mock.patch.object(attention, "splits_and_turns_at_once", there_is_one))
        stack.enter_context(mock.patch.object(head._WeightSum, "add", add_in_place))
        for module in (head, vocabulary):
            stack.enter_context(mock.patch.object(module, "default_chunks", pieces))
        stack.enter_context(
            mock.patch.object(GatedMLP, "_plain_swiglu", lambda mlp, fused: swiglu(fused, mlp.block_width))
        )
        yield
