"""Large bf16 products by the fastest kernel there is for them, and products that a matrix is added to on the way out.

For the products of a head over 128 thousand tokens cuBLAS's choice was up to 6% slower than its best kernel on an H200;
for those inside blocks it was the best (docs/performance.md).

Shape legend: m tokens, n outputs, k what is summed over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepstep.models.kernels.choice import fastest_kernel
from keepstep.models.kernels.cublaslt import Product, library

_WORTH_A_CHOICE = 1 << 42
"""Operations of a product that is worth a choice: trying its kernels takes about 60 times the product's own time."""
_WORTH_A_SUM = 1 << 37

_choices: dict[Any, tuple[Product, Any] | None] = {}


def multiply_into(out_mn: Tensor, a_mk: Tensor, b_kn: Tensor) -> Tensor:
    """a · b, written to `out_mn`, with the bits of torch's own product."""
    if not _is_large(a_mk, b_kn, _WORTH_A_CHOICE) or not out_mn.is_contiguous():
        return torch.mm(a_mk, b_kn, out=out_mn)
    choice = _choice(a_mk, b_kn, out_mn, None)
    if choice is None:
        return torch.mm(a_mk, b_kn, out=out_mn)
    product, kernel = choice
    product.run(kernel, a_mk, b_kn, out_mn)
    return out_mn


def multiply_and_add(a_mk: Tensor, b_kn: Tensor, added_mn: Tensor) -> Tensor:
    """a · b + added; where the GPU's library does it in one go, it is rounded once only."""
    if _is_large(a_mk, b_kn, _WORTH_A_SUM) and added_mn.is_contiguous():
        out_mn = torch.empty_like(added_mn)
        choice = _choice(a_mk, b_kn, out_mn, added_mn)
        if choice is not None:
            product, kernel = choice
            product.run(kernel, a_mk, b_kn, out_mn, added_mn)
            return out_mn
    return torch.mm(a_mk, b_kn).add_(added_mn)


def _is_large(a_mk: Tensor, b_kn: Tensor, operations: int) -> bool:
    if not a_mk.is_cuda or a_mk.dtype != torch.bfloat16 or 2 * a_mk.numel() * b_kn.shape[1] < operations:
        return False
    whole = all(side.is_contiguous() or side.t().is_contiguous() for side in (a_mk, b_kn))
    return whole and library() is not None


def _choice(a_mk: Tensor, b_kn: Tensor, out_mn: Tensor, added_mn: Tensor | None) -> tuple[Product, Any] | None:
    key = (a_mk.shape, b_kn.shape, a_mk.stride(), b_kn.stride(), a_mk.dtype, added_mn is None, a_mk.device.index)
    if key not in _choices:

        def run(product: Product, kernel: Any) -> None:
            product.run(kernel, a_mk, b_kn, out_mn, added_mn)

        def by_torch() -> None:
            torch.mm(a_mk, b_kn, out=out_mn)

        plain = by_torch if added_mn is None else None
        _choices[key] = fastest_kernel(key[:-1], lambda: Product(a_mk, b_kn, out_mn), run, out_mn, plain)
    return _choices[key]
