"""Every Triton kernel on a CPU: compiled for GPUs, and in Triton's interpreter the proof it must pass on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.models.kernels import cuda
from keepstep.models.ops import backend

ROOT = Path(__file__).parents[3]
TRITON = Path(sys.prefix) / "triton"
CHOOSES = {"top_experts"}
"""Multiplies nothing, so nothing is spoilt."""
WRITE_E4M3 = {
    "experts._quantize_kernel",
    "experts._quantize_rows_kernel",
    "experts_fp8._transposed_weights_kernel",
    "fp8._quantize_kernel",
    "fp8._swiglu_kernel",
    "quantized._rows_kernel",
}


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not TRITON.is_dir():
        pytest.skip("the interpreter is not installed: make test installs it from requirements/triton.txt")


def run(module: str, *arguments: str, **variables: str) -> dict[str, Any]:
    paths = [str(ROOT / "src"), str(ROOT), str(TRITON)]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.models.ops.{module}", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Triton prints what ptxas refuses before it.
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def differences(*arguments: str) -> dict[str, float]:
    return run("interpreted_kernels", *arguments, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_every_kernel_passes_its_proof() -> None:
    found = differences()
    assert len(found) == 15
    assert {name: difference for name, difference in found.items() if not difference < 0.003} == {}


@pytest.mark.slow
def test_every_proof_notices_products_that_are_a_little_too_large() -> None:
    found = differences("--spoil")
    assert {name for name, difference in found.items() if difference < cuda._AGREED} == CHOOSES


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    found = run("compiled_kernels", str(capability), TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 30
    refused = {name: error for name, error in found.items() if isinstance(error, str)}
    if capability < 89:
        # These GPUs have no e4m3, so `works` does without the kernels that write it.
        reasons = "fp8e4nv not supported", "requires .target sm_89 or higher"
        assert all(any(reason in error for reason in reasons) for error in refused.values())
        refused = {name: error for name, error in refused.items() if name not in WRITE_E4M3}
    assert refused == {}
    # The rows of cross-entropy are as long as was fastest on an H200, although some numbers do not fit.
    assert {name for name, spilled in found.items() if spilled and name not in WRITE_E4M3} <= {
        "cross_entropy._row_kernel"
    }


def test_a_kernel_whose_compiler_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 6)

    def prove(_device: torch.device) -> float:
        raise ValueError("no such architecture: sm_999")

    monkeypatch.setattr(torch.cuda, "device", torch.device)
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    assert not backend.proven("norm", OnGpu(), prove)  # type: ignore[arg-type]
    assert "norm does without its kernels: no such architecture: sm_999" in caplog.text
