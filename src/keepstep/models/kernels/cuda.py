"""Kernels written in CUDA C++: compiled at first use by the compiler library that comes with torch, run by the driver.

For what Triton cannot say: which warps fetch, which multiply, and when a tile is written. Everything goes through C
interfaces, so nothing needs a CUDA toolkit on the machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from keepstep.core.files import cache_folder as user_cache_folder
from keepstep.core.files import write_atomic

_BFLOAT16 = 9
_SWIZZLES = {64: 2, 128: 3}
"""Names of the driver's, by the bytes of a row that are swizzled."""
_L2_LINES_OF_128_BYTES = 2
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAX_SHARED_BYTES = 8
_HOPPER = (9, 0)
_FIRST_WITH_FP8 = (8, 9)
_AGREED = 0.01
"""Both sides of a proof round to bf16, which is 0.004."""

_log = logging.getLogger(__name__)


class CudaError(RuntimeError):
    """A kernel that could not be compiled, loaded or started."""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has the instructions of compute capability 9.0, which no other generation has."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) == _HOPPER


def multiplies_fp8(device: torch.device) -> bool:
    """Whether torch's fp8 matmuls run on a GPU; AMD's decide for themselves."""
    return torch.version.cuda is None or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _compiler() -> ctypes.CDLL:
    name = f"libnvrtc.so.{(torch.version.cuda or '0').partition('.')[0]}"
    # If the system's loader does not know it, it is in a package that is installed with torch.
    packaged = Path(torch.__file__).parents[1].glob(f"nvidia/**/{name}")
    for place in (name, *map(str, packaged)):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CudaError(f"{name} is not installed")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaError(f"{name} answered {status}")


def cache_folder() -> Path:
    """What a machine found out about its kernels, for restarts to be quick."""
    return user_cache_folder() / "kernels"


def source_of(*files: str) -> str:
    """Files of this folder, concatenated, with the lists expanded that hopper.cu describes."""
    text = "".join((Path(__file__).parent / f"{file}.cu").read_text() for file in files)
    text = re.sub(r"@NUMBERS (\d+)@", lambda found: ", ".join(f"%{i}" for i in range(int(found[1]))), text)
    return re.sub(
        r"@OPERANDS (\w+) (\d+)@",
        lambda found: ", ".join(f'"+f"({found[1]}[{i}])' for i in range(int(found[2]))),
        text,
    )


@functools.cache
def compile_source(source: str) -> bytes:
    """Machine code for Hopper; from the cache where this machine compiled the same before, for restarts to be quick."""
    major, minor = c_int(), c_int()
    _compiler().nvrtcVersion(byref(major), byref(minor))
    mark = hashlib.sha256(f"{major.value}.{minor.value}\n{source}".encode()).hexdigest()
    kept = cache_folder() / f"{mark}.cubin"
    with suppress(OSError):
        return kept.read_bytes()
    code = _compiled(source)
    # A machine may have no home that can be written to.
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, code)
    return code


def _compiled(source: str) -> bytes:
    compiler, program, size = _compiler(), c_void_p(), c_size_t()
    options = (b"--gpu-architecture=sm_90a", b"-std=c++17")
    if compiler.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise CudaError("the compiler takes no program")
    failed = compiler.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
    if failed:
        compiler.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise CudaError(log.value.decode(errors="replace"))
    compiler.nvrtcGetCUBINSize(program, byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, code)
    compiler.nvrtcDestroyProgram(byref(program))
    return code.raw


class Kernel:
    """One function of a compiled module, on one device."""

    def __init__(self, code: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        module, self._function, self._context = c_void_p(), c_void_p(), c_void_p()
        # Torch's own; the thread that runs backward passes may not have entered it yet.
        _call("cuDevicePrimaryCtxRetain", byref(self._context), device.index or 0)
        _call("cuCtxSetCurrent", self._context)
        _call("cuModuleLoadData", byref(module), code)
        _call("cuModuleGetFunction", byref(self._function), module, name.encode())
        _call("cuFuncSetAttribute", self._function, _MAX_SHARED_BYTES, c_int(shared_bytes))
        self._shared_bytes = shared_bytes

    def launch(self, blocks: int, threads: int, *arguments: TensorMap | Tensor | int | None) -> None:
        """Start it on the current stream. Tensors and None arrive there as pointers, numbers as 32 bits."""
        values = [_value(argument) for argument in arguments]
        parameters = (c_void_p * len(values))(*(place for _, place in values))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (blocks, 1, 1, threads, 1, 1, self._shared_bytes)
        _call("cuCtxSetCurrent", self._context)
        _call("cuLaunchKernel", self._function, *sizes, stream, parameters, None)


def _value(argument: TensorMap | Tensor | int | None) -> tuple[Any, int]:
    """What must stay alive until the launch, and its place in memory."""
    if isinstance(argument, TensorMap):
        return argument, argument.place
    if isinstance(argument, int):
        number = c_int(argument)
        return number, ctypes.addressof(number)
    value = c_void_p(None if argument is None else argument.data_ptr())
    return value, ctypes.addressof(value)


@dataclass(frozen=True)
class TensorMap:
    """What the copy engine must know of a bf16 tensor: made by `tensor_map`."""

    memory: ctypes.Array[ctypes.c_char]
    place: int


def tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """A view of a bf16 tensor, the contiguous dimension first; `strides` in numbers, of all dimensions but that one.

    A box is what one copy moves. In shared memory its rows are swizzled over their own length, 64 or 128 bytes.
    """
    rank = len(sizes)
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    row_bytes = box[0] * tensor.element_size()
    _call(
        "cuTensorMapEncodeTiled", c_void_p(place), _BFLOAT16, rank, c_void_p(tensor.data_ptr()),
        (c_uint64 * rank)(*sizes), (c_uint64 * (rank - 1))(*(stride * tensor.element_size() for stride in strides)),
        (c_uint32 * rank)(*box), (c_uint32 * rank)(*[1] * rank), 0, _SWIZZLES[row_bytes], _L2_LINES_OF_128_BYTES, 0,
    )  # fmt: skip
    return TensorMap(memory, place)


@functools.cache
def works(name: str, device: torch.device, proof: Callable[[torch.device], float]) -> bool:
    """Whether kernels run on the GPU at hand, and right; asked once, before they are used.

    `proof` computes something small with them and in torch's own operators, and gives the largest relative difference.
    A compiler or driver that we have never tested then costs only speed, whatever it raises.
    """
    try:
        # The question may come from a tracer, whose tensors have no numbers.
        with _disable_current_modes(), torch.cuda.device(device):
            difference = proof(device)
    except Exception as error:
        _log.warning("%s does without its kernels: %s", name, error)
        return False
    if not difference < _AGREED:
        _log.warning("%s does without its kernels: they are off by %.2g", name, difference)
    return difference < _AGREED


def difference(
    results: Callable[[Any, torch.device], Sequence[Tensor]], kernels: Any, plain: Any, device: torch.device
) -> float:
    """How far `results` with the kernels on the device are from those with torch's operators on the CPU."""
    ours = [part.cpu() for part in results(kernels, device)]
    return relative_difference(ours, results(plain, torch.device("cpu")))


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of the pair of tensors that differ most; NaN where one has a NaN."""
    pairs = zip(ours, theirs, strict=True)
    parts = [(one.float() - other.float()).norm() / other.float().norm() for one, other in pairs]
    return torch.stack(parts).max().item()
