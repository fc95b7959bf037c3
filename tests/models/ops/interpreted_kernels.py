"""The proof of every Triton kernel in Triton's interpreter, on a CPU: prints the differences as JSON.

A process of its own, because Triton decides at import whether it compiles or interprets:

    TRITON_INTERPRET=1 python -m tests.models.ops.interpreted_kernels [--spoil]

`--spoil` makes every product and quotient in kernels 2% too large: proofs that cannot fail would not notice.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from keepstep.models import norm, quantized_weight
from keepstep.models.kernels import cross_entropy, muon, optimizer, quantized
from keepstep.models.kernels import fp8 as fp8_kernels
from keepstep.models.kernels.cuda import relative_difference
from keepstep.models.ops import expert_rows, experts_fp8, fp8, qk_norm, rope, swiglu

TYPES = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
BITS = {1: torch.uint8, 2: torch.int16}


def prove_fp8_base(_device: torch.device) -> float:
    """The kernels of a frozen base in fp8, without its matmuls: those need a GPU."""
    generator = torch.Generator().manual_seed(1)
    x, factors = torch.randn(48, 2100, generator=generator).bfloat16(), torch.rand(2100, generator=generator)
    ours = [*quantized.quantize_rows(x, None), *quantized.quantize_rows(x, factors)]
    theirs = [*quantized_weight.quantize_fp8(x), *quantized_weight.quantize_fp8(x.float() * factors)]
    return relative_difference([*ours, quantized.transpose_bytes(ours[0])], [*theirs, theirs[0].float().t()])


PROOFS: dict[str, Callable[[torch.device], float]] = {
    "norm": norm._prove,
    "swiglu": swiglu._prove,
    "rope": rope._prove,
    "fp8": fp8._prove,
    "qk_norm": qk_norm._prove,
    "experts": expert_rows._prove,
    "top_experts": expert_rows._prove_choice,
    "quantize_rows": expert_rows._prove_quantization,
    "experts_fp8": experts_fp8._prove,
    "nf4": quantized_weight._nf4_difference,
    "fp8 base": prove_fp8_base,
    "cross_entropy": cross_entropy.prove,
    "cross_entropy in fp8": cross_entropy.prove_fp8,
    "optimizer": optimizer.prove,
    "muon": muon.prove,
}


class CorrectBuilder(interpreter.InterpreterBuilder):
    """The interpreter without three errors of its own (Triton 3.7 to 3.9)."""

    def binary_op(self, left: Any, right: Any, operation: Any) -> Any:
        """Comparisons give truth values; Triton's keep the type of what they compare, which `&` does not take."""
        output = operation(left.data, right.data)
        if output.dtype == np.bool_:
            return interpreter.TensorHandle(output, tl.int1)
        return super().binary_op(left, right, operation)

    def create_dot(self, left: Any, right: Any, total: Any, *_: Any) -> Any:
        """In fp32; Triton's multiplies the bits of bf16 as if they were whole numbers."""
        sides = [convert_float(side.data, side.dtype.scalar, tl.float32, None) for side in (left, right)]
        return interpreter.TensorHandle(np.matmul(*sides) + total.data, total.dtype.scalar)


class SpoiltBuilder(CorrectBuilder):
    """Every product and quotient 2% too large."""

    def binary_op(self, left: Any, right: Any, operation: Any) -> Any:
        """As said above; offsets are whole numbers and stay right."""
        result = super().binary_op(left, right, operation)
        if operation in (np.multiply, np.divide) and result.data.dtype == np.float32:
            result.data = result.data * np.float32(1.02)
        return result


def convert_float(data: Any, source: Any, target: Any, _rounding: Any) -> Any:
    """Between fp32 and shorter numbers, by torch. Triton's forgets the carry: 127.9 becomes 64 in fp8."""
    bits = torch.from_numpy(np.ascontiguousarray(data))
    numbers = bits.view(TYPES[source]) if source in TYPES else bits
    converted = numbers.to(TYPES.get(target, torch.float32))
    return (converted.view(BITS[converted.element_size()]) if target in TYPES else converted).numpy()


def rint(x: Any) -> Any:
    """A GPU's own library has it, an interpreter has not."""
    return tl.tensor(interpreter.TensorHandle(np.rint(x.handle.data), x.dtype), x.type)


def pack(*four: Any, e5m2: Any) -> Any:
    """Four numbers in fp8 as one word. On a GPU these are two instructions, which an interpreter does not know."""
    words = 0
    for place, value in enumerate(four):
        small = value.to(tl.float8e5 if e5m2 else tl.float8e4nv)
        words = words | (small.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * place))
    return words


def patched_once() -> Callable[[Any], Any]:
    """Triton patches its language at every call of a function, a fifth of all time here: once is enough."""
    patch = interpreter._patch_lang

    @functools.cache
    def patch_once(function: Any) -> Any:
        patch(function)
        # Its caller restores what this scope holds: nothing, so the next call finds the language patched.
        return interpreter._LangPatchScope()

    return patch_once


def main(arguments: list[str]) -> None:
    """A difference for each name."""
    interpreter._patch_lang = patched_once()
    interpreter._convert_float = convert_float
    interpreter.interpreter_builder = SpoiltBuilder() if "--spoil" in arguments else CorrectBuilder()
    interpreter.interpreter_semantic.builder = interpreter.interpreter_builder
    optimizer.libdevice = SimpleNamespace(rint=rint)
    fp8_kernels._pack = pack
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=4)  # type: ignore[assignment]
    print(json.dumps({name: prove(torch.device("cpu")) for name, prove in PROOFS.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
