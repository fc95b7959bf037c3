"""Products by cuBLASLt's C interface, for what torch does not offer: to say which kernel computes one, and to add a
matrix that stays as it is (torch copies it first).

It is the library that torch itself has loaded, so no version can be wrong. Matrices are column-major there: a · b of
row-major matrices is asked for as bᵀ · aᵀ, each as it lies, and nothing moves.

Shape legend: m tokens, n outputs, k what is summed over; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FP32_SUMS = 68
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSPOSE_LEFT, _TRANSPOSE_RIGHT, _SCALE_LEFT, _SCALE_RIGHT, _FAST_SUMS = 3, 4, 17, 18, 25
_WORKSPACE_BYTES = 1
_SPLIT_K = 2
_MOST_KERNELS = 8
_ONE, _ZERO = c_float(1), c_float(0)


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


@dataclass(frozen=True)
class Operands:
    """Both sides of a · bᵀ and the number that undoes each one's scale."""

    a8_mk: Tensor
    b8_nk: Tensor
    a_undo: Tensor
    b_undo: Tensor


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


def numbers_of(kernel: Any) -> list[int]:
    """What a kernel's description consists of, to be kept; the library gives no meaning to it."""
    return list(kernel)


def kernel_of(numbers: list[int]) -> Any:
    """The inverse of `numbers_of`; raises where these are no kernel's."""
    if len(numbers) != len(_Kernel()):
        raise ValueError(f"{len(numbers)} numbers describe no kernel")
    return _Kernel(*numbers)


class Product:
    """Products a · b of one shape, and a matrix beside it where one is given. Both may lie by rows or by columns."""

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


class ScaledProduct(Product):
    """Products of tensors in fp8."""

    def __init__(self, operands: Operands, out_mn: Tensor, *, fast_sums: bool) -> None:
        super().__init__(operands.a8_mk, operands.b8_nk.t(), out_mn)
        self._describe(_FAST_SUMS, c_int8(fast_sums))

    def run_scaled(self, kernel: Any, operands: Operands, out_mn: Tensor) -> None:
        """Compute it on the current stream, with both scales undone."""
        self._describe(_SCALE_LEFT, _pointer(operands.b_undo))
        self._describe(_SCALE_RIGHT, _pointer(operands.a_undo))
        self.run(kernel, operands.a8_mk, operands.b8_nk.t(), out_mn)


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
    """Of a matrix that lies by rows without gaps: columns to the library."""
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
