"""Which form of an operator runs: the GPU's own kernel, or torch's operators.

Every operator with two forms asks the backend in use. A dry run chooses a backend of its own, which keeps and allocates
what a GPU would on tensors without data; tests choose one that runs fused operators on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import works

Pair = tuple[Tensor, Tensor]

_CPU_CHUNK_BYTES = 1 << 26
"""Logits of one chunk on a CPU: small chunks stay near the caches."""
_GPU_SHARE = 16
"""One chunk's logits may take this part of a GPU's memory: fewer chunks sum the head's gradient less often."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with torch on Linux GPUs only."""
    return importlib.util.find_spec("triton") is not None


def proven(name: str, tensor: Tensor, proof: Callable[[torch.device], float]) -> bool:
    """Whether the Triton kernels of this name are there and right on the GPU of the tensor."""
    return tensor.is_cuda and has_triton() and works(name, tensor.device, proof)


def _prove(device: torch.device, module: str) -> float:
    """The proof that a module of Triton kernels has itself; it is imported where Triton is installed."""
    prove: Callable[[torch.device], float] = importlib.import_module(f"keepstep.models.kernels.{module}").prove
    return prove(device)


def _prove_fp8(device: torch.device) -> float:
    from keepstep.models.kernels.cross_entropy import prove_fp8

    return prove_fp8(device)


_PROOFS = {module: functools.partial(_prove, module=module) for module in ("cross_entropy", "optimizer", "muon")}


class KernelBackend:
    """The default: GPU kernels for CUDA tensors, torch's own operators elsewhere."""

    def has_kernels(self, tensor: Tensor) -> bool:
        """Whether rope, SwiGLU, RMS norm and cross-entropy run as one kernel each."""
        return tensor.is_cuda

    def fuses_matmuls(self, tensor: Tensor) -> bool:
        """Whether matmuls take what surrounds them as prologues and epilogues."""
        return tensor.is_cuda

    def has_cross_entropy(self, tensor: Tensor) -> bool:
        """Whether one kernel turns logits into their loss and gradient in place."""
        return proven("cross_entropy", tensor, _PROOFS["cross_entropy"])

    def cross_entropy_(self, logits_nv: Tensor, targets_n: Tensor, vocab: int, with_gradient: bool) -> Tensor:
        """Losses of every row; the logits become their own gradient."""
        from keepstep.models.kernels.cross_entropy import cross_entropy_

        return cross_entropy_(logits_nv, targets_n, vocab, with_gradient)

    def has_cross_entropy_fp8(self, tensor: Tensor) -> bool:
        """Whether one kernel computes the loss of logits and their gradient in fp8."""
        return proven("cross_entropy in fp8", tensor, _prove_fp8)

    def cross_entropy_fp8(self, logits_nv: Tensor, targets_n: Tensor, vocab: int, exponent: int) -> Pair:
        """Losses of every row, and the gradient in e5m2, 2 to the power of `exponent` times as large."""
        from keepstep.models.kernels.cross_entropy import cross_entropy_fp8

        return cross_entropy_fp8(logits_nv, targets_n, vocab, exponent)

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiply by a device scalar, in place."""
        if not self.has_cross_entropy(tensor):
            tensor.mul_(factor)
            return
        from keepstep.models.kernels.cross_entropy import scale_

        scale_(tensor, factor)

    def chunk_bytes(self, logits: Tensor) -> int:
        """Room for the logits of one chunk."""
        if logits.is_cuda:
            return torch.cuda.get_device_properties(logits.device).total_memory // _GPU_SHARE
        return _CPU_CHUNK_BYTES

    def add_matmul_(self, total_vd: Tensor, left_vn: Tensor, right_nd: Tensor) -> None:
        """Add left · right to an fp32 matrix, without rounding in between where the device can."""
        if total_vd.dtype == left_vn.dtype:
            total_vd.addmm_(left_vn, right_nd)
        elif total_vd.is_cuda:
            torch.addmm(total_vd, left_vn, right_nd, out_dtype=torch.float32, out=total_vd)
        else:
            total_vd.add_(torch.mm(left_vn, right_nd))

    def has_grouped_matmul(self, tensor: Tensor) -> bool:
        """Whether one kernel multiplies the rows of every expert."""
        from keepstep.models.ops.grouped_matmul import has_grouped_kernel

        return has_grouped_kernel(tensor.device, tensor.dtype)

    def row_counts(self, counts_sp: Tensor, rows: int) -> list[list[int]]:  # noqa: ARG002
        """How many of this process's `rows` go to each process, and how many arrive. Waits for the device."""
        counts: list[list[int]] = counts_sp.tolist()
        return counts

    def has_adamw(self, tensor: Tensor) -> bool:
        """Whether one kernel updates weights and moments in place."""
        return proven("optimizer", tensor, _PROOFS["optimizer"])

    def adamw_(self, halves: Pair, gradient: Tensor, moments: Pair, factor: Tensor, **settings: Any) -> None:
        """One AdamW update of a weight kept as two halves."""
        from keepstep.models.kernels.optimizer import adamw_

        adamw_(halves, gradient, moments, factor, **settings)

    def has_muon(self, tensor: Tensor) -> bool:
        """Whether one kernel each computes Muon's momentum and adds its direction."""
        return proven("muon", tensor, _PROOFS["muon"])

    def momentum_(self, gradient: Tensor, momentum: Tensor, factor: Tensor, beta: float) -> Tensor:
        """Muon's momentum in place, where `has_muon`; returns its direction in bf16."""
        from keepstep.models.kernels.muon import momentum_

        direction = torch.empty_like(gradient, dtype=torch.bfloat16)
        momentum_(gradient, momentum, direction, factor, beta)
        return direction

    def add_direction_(self, halves: Pair, direction: Tensor, factor: Tensor, keep: float, step: float) -> None:
        """keep · weight + step · direction, for a weight kept as two halves."""
        from keepstep.models.kernels.muon import apply_

        apply_(halves, direction.contiguous(), factor, keep, step)

    def add_fixed_point_(self, total: Tensor, gradient: Tensor, largest: Tensor, scale: float, first: bool) -> None:
        """Add round(gradient · scale) to an int64 `total`, or set it with `first`; raises the fp32 scalar `largest`."""
        if gradient.is_contiguous() and proven("optimizer", gradient, _PROOFS["optimizer"]):
            from keepstep.models.kernels.optimizer import add_fixed_point_

            add_fixed_point_(total, gradient, largest, scale, first)
            return
        exact = gradient.float()
        torch.maximum(largest, exact.abs().amax(), out=largest)
        # `mul` makes a copy: an fp32 gradient is not to be changed. The scale is a power of two, so it is exact.
        whole = exact.mul(scale).round_().view(-1).to(torch.int64)
        if first:
            total.copy_(whole)
        else:
            total.add_(whole)

    def is_finite(self, scalar: Tensor) -> bool:
        """Whether a device scalar is finite. Waits for the device."""
        return bool(torch.isfinite(scalar))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of the last dimension."""
        return F.rms_norm(x, weight.shape, weight, eps)


_in_use = KernelBackend()


def backend() -> KernelBackend:
    """The backend in use."""
    return _in_use


@contextmanager
def use_backend(chosen: KernelBackend) -> Iterator[None]:
    """Compute with another backend meanwhile."""
    global _in_use
    before, _in_use = _in_use, chosen
    try:
        yield
    finally:
        _in_use = before
