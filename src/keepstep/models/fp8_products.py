"""Large fp8 products by the fastest kernel there is for them, found by measuring at a shape's first use.

cuBLAS chooses among its kernels by a model of the GPU, and the choice that torch gets for fp8 is up to 19% slower than
the best one on an H200 (docs/performance.md). Here the candidates are timed once on the product at hand, in a run's
first step. A candidate must give the same bits as torch's own product: a run that is resumed may choose otherwise and
still computes the same numbers.

In bf16 there is next to nothing to win: those products draw all the power that the GPU may, by whichever kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepstep.models.kernels.cublaslt import CublasError, Operands, ScaledProduct, library

_LEAST_OPERATIONS = 1 << 40
"""Smaller products are not worth a choice: trying one takes half a second, most of it to load kernels."""
_ROUNDS = 3
_ROUND_S = 0.005
_WORTH = 0.98
"""A choice must take at most this part of the time of torch's own."""


@dataclass(frozen=True)
class _Choice:
    product: ScaledProduct
    kernel: Any


_choices: dict[Any, _Choice | None] = {}


def scaled_product(operands: Operands, dtype: torch.dtype, *, fast_sums: bool) -> Tensor:
    """a · bᵀ with both scales undone; both sides are contiguous along the dimension that is summed."""
    a8_mk, b8_nk = operands.a8_mk, operands.b8_nk
    out_mn = a8_mk.new_empty((a8_mk.shape[0], b8_nk.shape[0]), dtype=dtype)
    if 2 * out_mn.numel() * a8_mk.shape[1] >= _LEAST_OPERATIONS and library() is not None:
        key = (a8_mk.shape, b8_nk.shape, a8_mk.dtype, b8_nk.dtype, dtype, fast_sums, a8_mk.device)
        if key not in _choices:
            _choices[key] = _choose(operands, out_mn, fast_sums)
        choice = _choices[key]
        if choice is not None:
            choice.product.run(choice.kernel, operands, out_mn)
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


def _choose(operands: Operands, out_mn: Tensor, fast_sums: bool) -> _Choice | None:
    """The fastest kernel for this product, None where that is torch's own."""
    _by_torch(operands, out_mn, fast_sums)
    wanted_mn = out_mn.clone()

    def runner(kernel: Any) -> Callable[[], None]:
        return lambda: product.run(kernel, operands, out_mn)

    same = []
    try:
        product = ScaledProduct(operands, out_mn, fast_sums=fast_sums)
        for kernel in product.kernels():
            out_mn.zero_()
            product.run(kernel, operands, out_mn)
            if torch.equal(out_mn, wanted_mn):
                same.append(kernel)
    except CublasError:
        return None
    del wanted_mn
    seconds = _times_s([lambda: _by_torch(operands, out_mn, fast_sums), *map(runner, same)])
    fastest = min(range(len(seconds)), key=seconds.__getitem__)
    return _Choice(product, same[fastest - 1]) if seconds[fastest] < _WORTH * seconds[0] else None


def _times_s(ways: list[Callable[[], None]]) -> list[float]:
    """Seconds of one call of each, medians of rounds in which they take turns."""
    calls = [max(2, int(_ROUND_S / _time_s(way, 2))) for way in ways]
    rounds = [[_time_s(way, count) for way, count in zip(ways, calls, strict=True)] for _ in range(_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _time_s(way: Callable[[], None], calls: int) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(calls):
        way()
    after.record()
    after.synchronize()
    seconds: float = before.elapsed_time(after) / 1000 / calls
    return seconds
