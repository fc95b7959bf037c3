"""The projection with rope as its epilogue, in an emulator: its CUDA C++ compiled for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.models.kernels import gemm_tiles
from keepstep.models.kernels.cuda import source_of
from tests.models.ops.emulator import Emulator, emulated_map

NAMES = [name for name, (file, _) in gemm_tiles.TILE_KERNELS.items() if file == "qkv_rope"]
BLOCKS = 4
"""Two clusters, so that each has several tiles, and not all of them."""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    source = source_of("gemm_tiles", "qkv_rope")
    return Emulator(tmp_path_factory.mktemp("emulator"), ["emulated_hopper.h"], source, NAMES)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("seed_of_rests", [0, 1])
def test_projection_with_rope_agrees_with_torch(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, head_size: int, seed_of_rests: int
) -> None:
    def launch(name: str, x_mk: torch.Tensor, others: Any, column_tiles: int, *sizes: int) -> None:
        m, k = x_mk.shape
        left = emulated_map(x_mk, (k, m), (k,), (gemm_tiles.DEPTH, gemm_tiles.ROWS))
        shape = m // (2 * gemm_tiles.ROWS), column_tiles, k // gemm_tiles.DEPTH
        emulator.launch(name, BLOCKS, left, *others, *shape, *sizes)

    monkeypatch.setattr(gemm_tiles, "_launch", launch)
    monkeypatch.setattr(gemm_tiles, "tensor_map", emulated_map)
    emulator.rest_at_random(seed_of_rests)
    # Rows of tokens begin inside a tile.
    assert gemm_tiles._prove_rope(torch.device("cpu"), head_size, rows=2, tokens=128) < 4e-3


def test_heads_that_the_kernels_do_not_take() -> None:
    on_the_host = torch.empty(256, 512, dtype=torch.bfloat16)
    assert not gemm_tiles.can_fuse_rope(on_the_host, 1536, 96)
    assert not gemm_tiles.can_fuse_rope(on_the_host, 1536 - 128, 128)
