"""Matmuls through cuBLASLt's C interface, for what torch does not offer: to choose the kernel, and to add a
matrix that stays as it is (torch copies it first).

It is the library that torch itself has loaded, so no version can be wrong. Matrices are column-major there: a · b of
row-major matrices is requested as bᵀ · aᵀ, each as it is in memory, and nothing moves.

cuBLAS chooses by a model of the GPU, and its choice for a large gemm can be several percent slower than the best. Here
the fastest is measured, once per machine. A candidate must give the same bits as what it replaces: a resumed run may
choose another kernel and still computes the same numbers.

Shape legend: m tokens, n outputs, k what is summed over; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from keepstep.core.files import write_atomic
from keepstep.models.kernels.cuda import cache_folder

_FP32_SUMS = 68
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSPOSE_LEFT, _TRANSPOSE_RIGHT, _SCALE_LEFT, _SCALE_RIGHT, _FAST_SUMS = 3, 4, 17, 18, 25
_WORKSPACE_BYTES = 1
_SPLIT_K = 2
_MOST_KERNELS = 8
_ONE, _ZERO = c_float(1), c_float(0)
_SUMMED = 1 << 24
"""Numbers whose bits are added up at a time."""
_FINALISTS = 4
_ROUNDS, _ROUND_S, _LEAST_CALLS = 3, 0.02, 3
"""Long enough for the GPU to drop to the clock that it sustains under load."""
_WORTH = 0.98
"""A choice must take at most this fraction of the time of torch's own."""

_Kernel = c_uint64 * 8


class _Found(ctypes.Structure):
    """What the library answers when asked for kernels."""

    _fields_ = (
        ("kernel", _Kernel),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasError(RuntimeError):
    """A call that the library refused."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library in this process, None where torch came without it."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}")
    except OSError:
        return None


def version() -> int:
    """Of the library in this process."""
    found = library()
    return int(found.cublasLtGetVersion()) if found is not None else 0


def kernel_of(numbers: list[int]) -> Any:
    """The kernel that consists of these numbers, to which the library gives no meaning; raises where it is none."""
    if len(numbers) != len(_Kernel()):
        raise ValueError(f"{len(numbers)} numbers describe no kernel")
    return _Kernel(*numbers)


class Gemm:
    """Matmuls a · b of one shape, optionally plus a matrix. Both operands may be row-major or column-major."""

    def __init__(self, a_mk: Tensor, b_kn: Tensor, out_mn: Tensor) -> None:
        self._handle = _handle(out_mn.device.index)
        self._description = c_void_p()
        _call("MatmulDescCreate", byref(self._description), _FP32_SUMS, _TYPES[torch.float32])
        self._left = self._side(b_kn, _TRANSPOSE_LEFT)
        self._right = self._side(a_mk, _TRANSPOSE_RIGHT)
        self._result = _layout(out_mn)

    def _side(self, matrix: Tensor, transpose: int) -> c_void_p:
        by_columns = not matrix.is_contiguous()
        self._describe(transpose, c_int(by_columns))
        return _layout(matrix.t() if by_columns else matrix)

    def kernels(self) -> list[Any]:
        """What can compute it: no kernel that splits the sums, for their order would depend on the choice."""
        preference, count = c_void_p(), c_int()
        _call("MatmulPreferenceCreate", byref(preference))
        # No workspace: nothing is shared between streams.
        _call("MatmulPreferenceSetAttribute", preference, _WORKSPACE_BYTES, byref(c_size_t(0)), c_size_t(8))
        found = (_Found * _MOST_KERNELS)()
        matrices = (self._left, self._right, self._result, self._result)
        asked = (self._handle, self._description, *matrices, preference, _MOST_KERNELS, found, byref(count))
        try:
            _call("MatmulAlgoGetHeuristic", *asked)
        finally:
            _call("MatmulPreferenceDestroy", preference)
        return [one.kernel for one in found[: count.value] if one.status == 0 and _splits(one.kernel) <= 1]

    def run(self, kernel: Any, a_mk: Tensor, b_kn: Tensor, out_mn: Tensor, added_mn: Tensor | None = None) -> None:
        """Compute it on the current stream."""
        result = _pointer(out_mn)
        added, share = (result, _ZERO) if added_mn is None else (_pointer(added_mn), _ONE)
        _call(
            "Matmul", self._handle, self._description, byref(_ONE), _pointer(b_kn), self._left, _pointer(a_mk),
            self._right, byref(share), added, self._result, result, self._result, byref(kernel), None, c_size_t(0),
            c_void_p(torch.cuda.current_stream(out_mn.device).cuda_stream),
        )  # fmt: skip

    def _describe(self, what: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _call("MatmulDescSetAttribute", self._description, what, byref(value), size)


class ScaledGemm(Gemm):
    """Matmuls of tensors in fp8."""

    def __init__(self, a8_mk: Tensor, b8_kn: Tensor, out_mn: Tensor, *, fast_sums: bool) -> None:
        super().__init__(a8_mk, b8_kn, out_mn)
        self._describe(_FAST_SUMS, c_int8(fast_sums))

    def run_scaled(
        self, kernel: Any, a8_mk: Tensor, b8_kn: Tensor, a_inv_scale: Tensor, b_inv_scale: Tensor, out_mn: Tensor
    ) -> None:
        """Compute it on the current stream, with both scales undone."""
        self._describe(_SCALE_LEFT, _pointer(b_inv_scale))
        self._describe(_SCALE_RIGHT, _pointer(a_inv_scale))
        self.run(kernel, a8_mk, b8_kn, out_mn)


@functools.cache
def _handle(device_index: int) -> c_void_p:  # noqa: ARG001 - a handle belongs to the device that is current
    handle = c_void_p()
    _call("Create", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), f"cublasLt{name}")(*arguments)
    if status:
        raise CublasError(f"cublasLt{name} answered {status}")


def _layout(matrix: Tensor) -> c_void_p:
    """Layout of a contiguous row-major matrix, whose rows are columns to the library."""
    rows, columns = matrix.shape
    layout, dtype = c_void_p(), _TYPES[matrix.dtype]
    _call("MatrixLayoutCreate", byref(layout), dtype, c_uint64(columns), c_uint64(rows), c_int64(columns))
    return layout


def _pointer(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def _splits(kernel: Any) -> int:
    value, written = c_uint32(), c_size_t()
    _call("MatmulAlgoConfigGetAttribute", byref(kernel), _SPLIT_K, byref(value), c_size_t(4), byref(written))
    return value.value


G = TypeVar("G", bound=Gemm)


def fastest_kernel(
    about: Sequence[Any],
    make: Callable[[], G],
    run: Callable[[G, Any], None],
    out: Tensor,
    by_torch: Callable[[], None] | None,
) -> tuple[G, Any] | None:
    """The gemm and its kernel; None if torch's own choice is as good or there is no other.

    `about` identifies the gemm: a choice that is stored for it on this kind of GPU is not measured again. Candidates
    write to `out`. If torch has none, the reference bits are those of the library's first choice.
    """
    kept = _place(about, out.device)
    try:
        gemm = make()
        # The stored choice may be damaged or missing.
        with suppress(OSError, ValueError, TypeError, CublasError):
            kernel = _read(kept)
            if kernel is None:
                return None
            run(gemm, kernel)
            return gemm, kernel
        same = _same_bits(gemm.kernels(), lambda kernel: run(gemm, kernel), out, by_torch)
    except (CublasError, torch.OutOfMemoryError):
        return None
    ways: list[Callable[[], None]] = [lambda kernel=kernel: run(gemm, kernel) for kernel in same]  # type: ignore[misc]
    if by_torch is None:
        fastest = _fastest(ways, worth=1)
        kernel = None if fastest is None else same[fastest]
    else:
        kernel = [None, *same][_fastest([by_torch, *ways], worth=_WORTH) or 0]
    # A machine may have no home that can be written to.
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps(None if kernel is None else list(kernel)).encode())
    return None if kernel is None else (gemm, kernel)


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
    """Sums of every row's and every column's bits: enough to compare, when a copy of all logits may not fit."""
    numbers_mn = out_mn.view({2: torch.int16, 4: torch.int32}[out_mn.element_size()])
    columns_n = torch.zeros(out_mn.shape[1], dtype=torch.int64, device=out_mn.device)
    rows = []
    # Torch converts all that it adds up to the type of the sum first: for all logits, four times their memory.
    for part_mn in numbers_mn.split(max(1, _SUMMED // out_mn.shape[1])):
        columns_n += part_mn.sum(0, dtype=torch.int64)
        rows.append(part_mn.sum(1, dtype=torch.int64))
    return torch.cat([columns_n, *rows])


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
