"""Which of cuBLASLt's kernels computes a product: the fastest on the GPU at hand, found by measuring, once a machine.

cuBLAS chooses by a model of the GPU, and its choice for a large product can be several percent slower than the best. A
candidate must give the same bits as what it replaces: a run that is resumed may choose otherwise and still computes the
same numbers.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from keepstep.core.files import write_atomic
from keepstep.models.kernels.cublaslt import CublasError, Product, kernel_of, numbers_of, version
from keepstep.models.kernels.cuda import cache_folder

P = TypeVar("P", bound=Product)

_FINALISTS = 4
_ROUNDS, _ROUND_S, _LEAST_CALLS = 3, 0.02, 3
"""Long enough for the GPU to come down to the clock that the work allows it."""
_WORTH = 0.98
"""A choice must take at most this part of the time of torch's own."""


def fastest_kernel(
    about: Sequence[Any],
    make: Callable[[], P],
    run: Callable[[P, Any], None],
    out: Tensor,
    by_torch: Callable[[], None] | None,
) -> tuple[P, Any] | None:
    """The product and its kernel, None where torch's own way is as good or there is no other.

    `about` tells products apart: what was chosen for one like it on this kind of GPU is not measured again. All ways
    write to `out`. Where torch has none, the bits are those of the library's first choice.
    """
    kept = _place(about, out.device)
    try:
        product = make()
        # What is kept may be damaged, or not be there.
        with suppress(OSError, ValueError, TypeError, CublasError):
            kernel = _read(kept)
            if kernel is None:
                return None
            run(product, kernel)
            return product, kernel
        same = _same_bits(product.kernels(), lambda kernel: run(product, kernel), out, by_torch)
    except (CublasError, torch.OutOfMemoryError):
        return None
    ways: list[Callable[[], None]] = [lambda kernel=kernel: run(product, kernel) for kernel in same]  # type: ignore[misc]
    if by_torch is None:
        fastest = _fastest(ways, worth=1)
        kernel = None if fastest is None else same[fastest]
    else:
        kernel = [None, *same][_fastest([by_torch, *ways], worth=_WORTH) or 0]
    # A machine may have no home that can be written to.
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps(None if kernel is None else numbers_of(kernel)).encode())
    return None if kernel is None else (product, kernel)


def _place(about: Sequence[Any], device: torch.device) -> Path:
    facts = [torch.cuda.get_device_name(device), version(), *map(str, about)]
    return cache_folder() / "choices" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.json"


def _read(kept: Path) -> Any | None:
    numbers = json.loads(kept.read_text())
    return None if numbers is None else kernel_of(numbers)


def _same_bits(
    kernels: list[Any], run: Callable[[Any], None], out: Tensor, by_torch: Callable[[], None] | None
) -> list[Any]:
    wanted: Tensor | None = None
    if by_torch is not None:
        by_torch()
        wanted = _bits(out)
    same = []
    for kernel in kernels:
        out.zero_()
        run(kernel)
        found = _bits(out)
        wanted = found if wanted is None else wanted
        if torch.equal(found, wanted):
            same.append(kernel)
    return same


def _bits(out_mn: Tensor) -> Tensor:
    """Sums of every row's and every column's bits: enough to tell, where a copy of all logits may be too much."""
    numbers_mn = out_mn.view({2: torch.int16, 4: torch.int32}[out_mn.element_size()])
    return torch.cat([numbers_mn.sum(dim, dtype=torch.int64) for dim in (0, 1)])


def _fastest(ways: list[Callable[[], None]], worth: float) -> int | None:
    """Which way is the fastest: the first one unless another takes at most `worth` of its time."""
    if not ways:
        return None
    once_s = [_time_s(way, 1) for way in ways]
    others = sorted(range(1, len(ways)), key=once_s.__getitem__)
    finalists = [0, *others[: _FINALISTS - 1]]
    calls = [max(_LEAST_CALLS, int(_ROUND_S / once_s[number])) for number in finalists]
    rounds = [
        [_time_s(ways[number], count) for number, count in zip(finalists, calls, strict=True)] for _ in range(_ROUNDS)
    ]
    first_s, *seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
    if not seconds or min(seconds) >= worth * first_s:
        return 0
    return finalists[1 + seconds.index(min(seconds))]


def _time_s(way: Callable[[], None], calls: int) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(calls):
        way()
    after.record()
    after.synchronize()
    seconds: float = before.elapsed_time(after) / 1000 / calls
    return seconds
