"""Every Triton kernel on a CPU: the proof that it must pass on a GPU before it is trusted, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.models.kernels import cuda
from keepstep.models.ops import backend

ROOT = Path(__file__).parents[3]
TRITON = Path(sys.prefix) / "triton"
CHOOSES = {"top_experts"}
"""Multiplies nothing, so nothing is spoilt."""


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not TRITON.is_dir():
        pytest.skip("the interpreter is not installed: make test installs it from requirements/triton.txt")


def differences(*arguments: str) -> dict[str, float]:
    paths = [str(ROOT / "src"), str(ROOT), str(TRITON)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.ops.interpreted_kernels", *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_every_kernel_passes_its_proof() -> None:
    found = differences()
    assert len(found) == 13
    assert {name: difference for name, difference in found.items() if not difference < 0.003} == {}


@pytest.mark.slow
def test_every_proof_notices_products_that_are_a_little_too_large() -> None:
    found = differences("--spoil")
    assert {name for name, difference in found.items() if difference < cuda._AGREED} == CHOOSES


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
