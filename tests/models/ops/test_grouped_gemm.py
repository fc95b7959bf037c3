"""The kernels of experts in an emulator: their CUDA C++ compiled for the CPU, Hopper's instructions as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keepstep.models.kernels import gemm_tiles, grouped_gemm
from keepstep.models.kernels.cuda import source_of
from tests.models.ops.emulator import Emulator, emulated_map

CPU = torch.device("cpu")
NAMES = [name for name, (file, _) in gemm_tiles.TILE_KERNELS.items() if file == "grouped_gemm"]
BLOCKS = 4
"""Two clusters, so that each has several tiles, and not all of them."""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    source = source_of("gemm_tiles", "grouped_gemm")
    return Emulator(tmp_path_factory.mktemp("emulator"), ["emulated_hopper.h"], source, NAMES)


@pytest.fixture
def launches(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The wrappers of grouped_gemm.py run in the emulator."""

    def launch(name: str, *arguments: Any) -> None:
        emulator.launch(name, BLOCKS, *arguments)

    monkeypatch.setattr(grouped_gemm, "_launch", launch)
    monkeypatch.setattr(grouped_gemm, "tensor_map", emulated_map)
    return launch


@pytest.mark.usefixtures("launches")
@pytest.mark.slow
def test_expert_kernels_agree_with_torch() -> None:
    # Two tiles and a part of one, no row, one row, and a tile that two experts would fit in.
    assert grouped_gemm.difference_from_torch(CPU, (300, 0, 1, 70), hidden=512, width=256) < 4e-3


@pytest.mark.usefixtures("launches")
@pytest.mark.slow
def test_fp8_expert_kernels_agree_with_torch() -> None:
    # Fewer rows than a step takes, and more than one step.
    assert grouped_gemm.difference_in_fp8(CPU, (260, 0, 70), hidden=768, width=256) < 4e-3


@pytest.mark.usefixtures("launches")
@pytest.mark.slow
def test_fp8_sums_over_many_rows_are_added_up_in_parts() -> None:
    assert grouped_gemm.difference_in_fp8(CPU, (2200, 10), hidden=512, width=256) < 4e-3
