"""Bits on a CPU do not depend on what the process computed before."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# fp32 losses and gradients before and after matmuls in bf16 and fp16, which make torch choose kernels.
PROGRAM = """
import torch
from torch.nn import functional as F
from tests.models.model_variants import VARIANTS, build, random_tokens

config = VARIANTS["grouped rotary"]

def bits():
    model = build(config)
    tokens = random_tokens(config, 2, 16)
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

before, enabled = bits(), torch._C._get_mkldnn_enabled()
for dtype in (torch.bfloat16, torch.float16):
    a = torch.randn(4, 64, 64).to(dtype)
    F.linear(a[0], a[1], a[0, 0]), a[0] @ a[1].t(), torch.bmm(a, a), torch.baddbmm(a, a, a)
assert torch._C._get_mkldnn_enabled() == enabled
assert all(map(torch.equal, before, bits()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["DEFAULT", "AVX2"])
def test_fp32_bits_are_equal_before_and_after_bf16_matmuls(instructions: str) -> None:
    if instructions != "DEFAULT" and platform.machine() != "x86_64":
        pytest.skip("these instructions belong to x86_64")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": instructions}
    command = [sys.executable, "-W", "error::UserWarning", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("machine", "bf16", "enabled"), [("aarch64", False, False), ("aarch64", True, True), ("x86_64", False, True)]
)
@pytest.mark.slow
def test_onednn_is_switched_off_where_bf16_would_switch_it_off(machine: str, bf16: bool, enabled: bool) -> None:
    """In a process of its own: the switch is for the whole process."""
    program = (
        "import platform, torch\n"
        "from keepstep.models import transformer\n"
        f"platform.machine = lambda: {machine!r}\n"
        f"transformer.computes_bf16 = lambda: {bf16}\n"
        "from tests.models.model_variants import VARIANTS, build\n"
        "build(VARIANTS['learned'])\n"
        "print(torch._C._get_mkldnn_enabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{enabled}\n"
