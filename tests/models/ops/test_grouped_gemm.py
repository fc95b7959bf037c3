"""The kernels of experts in an emulator: their CUDA C++ compiled for the CPU, Hopper's instructions as functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepstep.models.kernels import cuda, gemm_tiles, grouped_gemm
from keepstep.models.kernels.cuda import source_of

CPU = torch.device("cpu")
EMULATOR = Path(__file__).with_name("emulated_hopper.h")
NAMES = [name for name, (file, _) in gemm_tiles.TILE_KERNELS.items() if file == "grouped_gemm"]
BLOCKS = 4
"""Two clusters, so that each has several tiles, and not all of them."""


class Map(ctypes.Structure):
    """As the emulator knows it."""

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


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("emulator")
    cases = "".join(
        f'  if (!strcmp(name, "{name}")) return launch(blocks, [=] {{ call({name}, arguments); }});\n' for name in NAMES
    )
    entry = f'extern "C" int run(const char* name, int blocks, void** arguments) {{\n{cases}  return 2;\n}}\n'
    source = folder / "kernels.cpp"
    source.write_text(EMULATOR.read_text() + source_of("gemm_tiles", "grouped_gemm") + entry)
    library = folder / "kernels.so"
    subprocess.run([compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def launches(emulator: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The wrappers of grouped_gemm.py run in the emulator."""

    def launch(name: str, *arguments: Any) -> None:
        values = [cuda._value(argument) for argument in arguments]
        parameters = (ctypes.c_void_p * len(values))(*(place for _, place in values))
        assert emulator.run(name.encode(), BLOCKS, parameters) == 0, f"{name}: all threads wait for one another"

    monkeypatch.setattr(grouped_gemm, "_launch", launch)
    monkeypatch.setattr(grouped_gemm, "tensor_map", emulated_map)
    return launch


@pytest.mark.usefixtures("launches")
def test_expert_kernels_agree_with_torch() -> None:
    # Two tiles and a part of one, no row, one row, and a tile that two experts would fit in.
    assert grouped_gemm.difference_from_torch(CPU, (300, 0, 1, 70), hidden=512, width=256) < 4e-3


@pytest.mark.usefixtures("launches")
def test_fp8_expert_kernels_agree_with_torch() -> None:
    assert grouped_gemm.difference_in_fp8(CPU, (260, 0, 70), hidden=1024, width=256) < 4e-3
