"""Matmuls with fused epilogues in an emulator: their CUDA C++ compiled for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from keepstep.models.kernels import gemm_tiles
from keepstep.models.kernels.cuda import relative_difference, source_of
from keepstep.models.ops.swiglu import activate, activate_backward
from tests.models.ops.emulator import Emulator, emulated_map

FILES = {"qkv_rope", "swiglu_mlp", "gelu_mlp"}
BLOCKS = 4
"""Two clusters, so that each has several tiles, and not all of them."""


@pytest.fixture(scope="module")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulator]:
    made = {}
    for file in FILES:
        names = [name for name, (of, _) in gemm_tiles.TILE_KERNELS.items() if of == file]
        folder = tmp_path_factory.mktemp(file)
        made[file] = Emulator(folder, ["emulated_hopper.h"], source_of("gemm_tiles", file), names)
    return made


@pytest.fixture(params=[0, 1], ids="rests-{}".format)
def _launches(request: Any, emulators: dict[str, Emulator], monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers of gemm_tiles.py run in the emulator."""

    def launch(name: str, left: Any, others: Any, column_tiles: int, *sizes: int) -> None:
        m, k = left.shape
        rows = emulated_map(left, (k, m), (k,), (gemm_tiles.DEPTH, gemm_tiles.ROWS))
        numbers = (m // (2 * gemm_tiles.ROWS), column_tiles, k // gemm_tiles.DEPTH, *sizes)
        emulators[gemm_tiles.TILE_KERNELS[name][0]].launch(name, BLOCKS, rows, *others, *numbers)

    for emulator in emulators.values():
        emulator.rest_at_random(request.param)
    monkeypatch.setattr(gemm_tiles, "_launch", launch)
    monkeypatch.setattr(gemm_tiles, "tensor_map", emulated_map)


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.slow
def test_projection_with_rope_agrees_with_torch(head_size: int) -> None:
    # Rows of tokens begin inside a tile.
    assert gemm_tiles._prove_rope(torch.device("cpu"), head_size, rows=2, tokens=128) < 4e-3


@pytest.mark.usefixtures("_launches")
@pytest.mark.slow
def test_swiglu_inside_its_matmuls() -> None:
    # SmolLM's hidden size: as many steps as pieces, and one more. Three tiles for one of two pairs of blocks.
    torch.manual_seed(1)
    m, k, f, width = 768, 576, 512, 256
    x, d_out = (torch.randn(m, k).bfloat16() for _ in range(2))
    gate_up, down = ((torch.randn(shape) * k**-0.5).bfloat16() for shape in ((2 * f, k), (k, f)))
    activation, saved_grad = gemm_tiles.swiglu_gemm_forward(x, gate_up, width)
    d_gate_up = gemm_tiles.swiglu_gemm_backward(d_out, down, saved_grad, width)
    fused = torch.mm(x, gate_up.t())
    expected = activate(fused, width), activate_backward(torch.mm(d_out, down), fused, width)
    assert relative_difference((activation, d_gate_up), expected) < 4e-3


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize("by_tanh", [False, True])
@pytest.mark.slow
def test_gelu_inside_its_matmuls(by_tanh: bool) -> None:
    torch.manual_seed(1)
    m, k, f = 768, 576, 256
    x, d_out = (torch.randn(m, k).bfloat16() for _ in range(2))
    up, down, bias = ((torch.randn(shape) * k**-0.5).bfloat16() for shape in ((f, k), (k, f), (f,)))
    activation, saved_grad = gemm_tiles.gelu_gemm_forward(x, up, bias, by_tanh)
    d_wide = gemm_tiles.gelu_gemm_backward(d_out, down, saved_grad)
    name = "tanh" if by_tanh else "none"
    wide = F.linear(x, up, bias)
    d_expected = torch.ops.aten.gelu_backward(torch.mm(d_out, down), wide, approximate=name)
    assert relative_difference((activation, d_wide), (F.gelu(wide, approximate=name), d_expected)) < 5e-3


def test_heads_that_the_kernels_do_not_take() -> None:
    on_the_host = torch.empty(256, 512, dtype=torch.bfloat16)
    assert not gemm_tiles.can_fuse_rope(on_the_host, 1536, 96)
    assert not gemm_tiles.can_fuse_rope(on_the_host, 1536 - 128, 128)
