"""Compiles CUDA C++ kernels for the CPU, with Hopper's instructions as functions, and launches them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from keepstep.models.kernels import cuda

HERE = Path(__file__).parent


class Map(ctypes.Structure):
    """A tensor map as the emulator knows it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_long),
        *((name, ctypes.c_long * 5) for name in ("sizes", "strides", "box")),
    ]


def emulated_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> cuda.TensorMap:
    bytes_of = [tensor.element_size() * stride for stride in (1, *strides)]
    numbers = [(ctypes.c_long * 5)(*values) for values in (sizes, bytes_of, box)]
    made = Map(tensor.data_ptr(), len(sizes), *numbers)
    return cuda.TensorMap(made, ctypes.addressof(made))  # type: ignore[arg-type]


class Emulator:
    """Kernels of one source; `headers` stand in for files that hold Hopper's instructions."""

    def __init__(
        self, folder: Path, headers: Sequence[str], source: str, names: Sequence[str], threads: int = 384
    ) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++")
        cases = "".join(
            f'  if (!strcmp(name, "{name}")) return launch(blocks, [=] {{ call({name}, arguments); }});\n'
            for name in names
        )
        entry = 'extern "C" void rest_at_random(int seed) { seed_of_rests = seed; }\n'
        entry += f'extern "C" int run(const char* name, int blocks, void** arguments) {{\n{cases}  return 2;\n}}\n'
        text = folder / "kernels.cpp"
        text.write_text("".join((HERE / header).read_text() for header in headers) + source + entry)
        library = folder / "kernels.so"
        flags = ["-O2", "-std=c++17", f"-DTHREADS={threads}", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", library, text], check=True)
        self._library = ctypes.CDLL(str(library))

    def rest_at_random(self, seed: int) -> None:
        """From now on warpgroups rest while others go on, by a seed; 0: none rests."""
        self._library.rest_at_random(seed)

    def launch(self, name: str, blocks: int, *arguments: Any) -> None:
        """Run one kernel to its end: two thread blocks at a time."""
        values = [cuda._value(argument) for argument in arguments]
        parameters = (ctypes.c_void_p * len(values))(*(place for _, place in values))
        assert self._library.run(name.encode(), blocks, parameters) == 0, f"{name}: all threads wait for one another"
