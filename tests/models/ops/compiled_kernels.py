"""Compiles every Triton kernel for a GPU that is not there, as its proof would launch it; prints what came out as JSON.

    python -m tests.models.ops.compiled_kernels 90

The number is a compute capability: 80 (A100), 90 (H100, H200). For each kernel: the bytes of a thread that did not fit
in registers, or the compiler's error.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.models.ops.interpreted_kernels import PROOFS

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


class NoGpu:
    """What the compiler asks of a GPU's driver."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The only one."""
        return 0


def spilled_bytes(program: str, capability: int) -> int:
    """Bytes that a thread stores because they do not fit in registers."""
    name = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(program)
        file.flush()
        command = [str(ASSEMBLER), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(each) for each in re.findall(r"(\d+) bytes spill stores", said))


def main(capability: int) -> None:
    """One entry for each kernel."""
    driver.set_active(NoGpu(capability))
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    found: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"
        try:
            compiled = launch(self, *arguments, grid=grid, warmup=True, **options)
            spilled = spilled_bytes(compiled.asm["ptx"], capability)
        except Exception as error:
            found[name] = str(error.__cause__ or error)
            return
        if not isinstance(found.get(name), str):
            found[name] = max(spilled, found.get(name, 0))

    JITFunction.run = compile_only
    for prove in PROOFS.values():
        prove(torch.device("cpu"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
