"""Large fp8 products by the fastest kernel there is for them, found by measuring at a shape's first use.

The choice that torch gets for fp8 is up to 19% slower than the best one on an H200 (docs/performance.md). Here the
candidates are timed once on the product at hand, in a run's first step on this kind of machine (`kernels/choice.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepstep.models.kernels.choice import fastest_kernel
from keepstep.models.kernels.cublaslt import Operands, ScaledProduct, library

_LEAST_OPERATIONS = 1 << 40
"""Smaller products are not worth a choice: trying one takes half a second, most of it to load kernels."""


_choices: dict[Any, tuple[ScaledProduct, Any] | None] = {}


def scaled_product(operands: Operands, dtype: torch.dtype, *, fast_sums: bool) -> Tensor:
    """a · bᵀ with both scales undone; both sides are contiguous along the dimension that is summed."""
    a8_mk, b8_nk = operands.a8_mk, operands.b8_nk
    out_mn = a8_mk.new_empty((a8_mk.shape[0], b8_nk.shape[0]), dtype=dtype)
    if 2 * out_mn.numel() * a8_mk.shape[1] >= _LEAST_OPERATIONS and library() is not None:
        key = (a8_mk.shape, b8_nk.shape, a8_mk.dtype, b8_nk.dtype, dtype, fast_sums, a8_mk.device.index)
        if key not in _choices:
            _choices[key] = _choose(key[:-1], operands, out_mn, fast_sums)
        choice = _choices[key]
        if choice is not None:
            product, kernel = choice
            product.run_scaled(kernel, operands, out_mn)
            return out_mn
    _by_torch(operands, out_mn, fast_sums)
    return out_mn


def _by_torch(operands: Operands, out_mn: Tensor, fast_sums: bool) -> None:
    torch._scaled_mm(
        operands.a8_mk,
        operands.b8_nk.t(),
        scale_a=operands.a_undo,
        scale_b=operands.b_undo,
        out_dtype=out_mn.dtype,
        use_fast_accum=fast_sums,
        out=out_mn,
    )


def _choose(
    about: tuple[Any, ...], operands: Operands, out_mn: Tensor, fast_sums: bool
) -> tuple[ScaledProduct, Any] | None:
    """The fastest kernel for this product, None where that is torch's own."""
    return fastest_kernel(
        about,
        lambda: ScaledProduct(operands, out_mn, fast_sums=fast_sums),
        lambda product, kernel: product.run_scaled(kernel, operands, out_mn),
        out_mn,
        lambda: _by_torch(operands, out_mn, fast_sums),
    )
