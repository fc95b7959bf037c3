"""Frozen weights in 8 or 4 bits under adapters, quantised one at a time while they are loaded.

- fp8: e4m3 with one fp32 scale for each output. On a GPU with fp8 matmuls activations are quantised too, with one scale
  for each token, and the matmul runs in fp8. The gradient of the input sums over outputs, whose scales cannot leave
  that sum: the gradient is multiplied by them before it is quantised. Hopper needs both operands contiguous along the
  summed dimension, so this matmul reads a transposed copy of the weight, which exists while it runs. A second copy for
  the whole run would double the memory of the weights to save about 1% of a step.
- nf4: the 16 values of QLoRA, with the blocks, order and packing of bitsandbytes: 64 neighbouring weights share one
  fp32 scale, and a byte holds two of them, the first in its high bits. One weight is dequantised for its matmul.

Elsewhere both are dequantised for each matmul. No dequantised copy outlives its matmul.

Shape legend: m tokens, k inputs, n outputs, r rank of the adapters; a trailing 8 is a tensor in fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.core.errors import ConfigError
from keepstep.models.kernels.cuda import is_hopper, relative_difference, works
from keepstep.models.ops.backend import backend, has_triton, proven

QuantizedFormat = Literal["fp8", "nf4"]
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_MULTIPLE = 16
"""The tensor cores' fp8 matmuls need sizes that are multiples of this."""
NF4_BLOCK = 64
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_CHUNK = 1 << 26
"""Weights that are quantised together: what this needs in fp32 stays small next to the model."""
_TINY = 1e-12


class QuantizedWeight(nn.Module):
    """A frozen matrix [n, k] as codes and scales. They are buffers: FSDP leaves them whole on every process."""

    codes: Tensor
    scales: Tensor

    def __init__(self, kind: QuantizedFormat, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.kind, self.shape = kind, torch.Size((rows, columns))
        size, multiple = rows * columns, FP8_MULTIPLE if kind == "fp8" else 1
        if rows % multiple or columns % multiple or size % NF4_BLOCK:
            needs = f"multiples of {FP8_MULTIPLE}" if kind == "fp8" else f"a multiple of {NF4_BLOCK} in all"
            raise ConfigError(
                f"lora.base {kind} needs layer sizes of {needs}, not {columns} → {rows}", "lora.base=bf16"
            )
        codes = (rows, columns) if kind == "fp8" else (size // 2,)
        scales = rows if kind == "fp8" else size // NF4_BLOCK
        self.register_buffer("codes", torch.empty(codes, dtype=FP8 if kind == "fp8" else torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.float32, device=device))

    @property
    def device(self) -> torch.device:
        """Where codes and scales are."""
        return self.codes.device

    @torch.no_grad()
    def store(self, whole_nk: Tensor) -> None:
        """Quantise a matrix of any precision, a part at a time."""
        rows, columns = self.shape
        quantize = quantize_fp8 if self.kind == "fp8" else quantize_nf4
        # Whole rows, and whole blocks: 64 rows always hold whole blocks.
        step = max(1, _CHUNK // columns // NF4_BLOCK) * NF4_BLOCK
        codes, scales = self.codes.view(-1), self.scales
        for first in range(0, rows, step):
            part_codes, part_scales = quantize(whole_nk[first : first + step].to(self.device))
            start, at = first * codes.numel() // rows, first * scales.numel() // rows
            codes[start : start + part_codes.numel()] = part_codes.view(-1)
            scales[at : at + part_scales.numel()] = part_scales

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the codes stand for."""
        return dequantize(self.codes, self.scales, self.shape[0], dtype)

    def matmul(
        self, x: Tensor, bias_n: Tensor | None, lora_a_rk: Tensor | None = None, lora_b_nr: Tensor | None = None
    ) -> Tensor:
        """x · (weight + lora_b · lora_a)ᵀ + bias."""
        out_mn: Tensor = _QuantizedMatmul.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), self.codes, self.scales, self.shape[0], bias_n, lora_a_rk, lora_b_nr
        )
        return out_mn.view(*x.shape[:-1], -1)


class QuantizedLinear(nn.Linear):
    """A frozen linear whose weight is in `base`; it has no parameter `weight`."""

    def __init__(self, plain: nn.Linear, kind: QuantizedFormat) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_parameter("weight", None)
        self.bias = plain.bias
        self.base = QuantizedWeight(kind, plain.out_features, plain.in_features, plain.weight.device)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """The matmul and the bias."""
        return self.base.matmul(input, self.bias)


def quantize_linears(blocks: nn.ModuleDict, kind: QuantizedFormat) -> None:
    """Replace the plain linears of all blocks, in place; embeddings, head and norms stay as they are."""
    for name, linear in [item for item in blocks.named_modules() if type(item[1]) is nn.Linear]:
        blocks.set_submodule(name, QuantizedLinear(linear, kind))


def holds_quantized_weights(model: nn.Module) -> bool:
    """Whether any weight is frozen in few bits."""
    return any(isinstance(module, QuantizedWeight) for module in model.modules())


def weight_slots(model: nn.Module) -> Iterator[tuple[str, nn.Parameter | QuantizedWeight]]:
    """Where each weight of a model goes, by the name that it has without quantisation."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield name.removesuffix("base") + "weight", module


def quantize_fp8(whole_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, k], each row's largest magnitude filling the format, and the scales [n] that undo it."""
    exact = whole_nk.float()
    scales_n = exact.abs().amax(dim=1).clamp(min=_TINY) / FP8_MAX
    return (exact / scales_n[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales_n


def quantize_nf4(whole_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and the largest magnitude of each block, as bitsandbytes has them."""
    values = torch.tensor(NF4_VALUES, device=whole_nk.device)
    blocks = whole_nk.float().reshape(-1, NF4_BLOCK)
    largest = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    codes = torch.bucketize(scaled.flatten(), (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes[::2] << 4 | codes[1::2], largest


def dequantize(codes: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The matrix [n, k] of codes and scales; computed in fp32 and rounded once."""
    if codes.dtype == FP8:
        return (codes.float() * scales[:, None]).to(dtype)
    if proven("nf4", codes, _nf4_difference):
        from keepstep.models.kernels.quantized import dequantize_nf4

        return dequantize_nf4(codes, scales, _nf4_table(codes.device), dtype).view(rows, -1)
    return dequantize_nf4_by_torch(codes, scales, dtype).view(rows, -1)


def dequantize_nf4_by_torch(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in their order."""
    pairs = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1, NF4_BLOCK)
    return (_nf4_table(codes.device)[pairs.int()] * scales[:, None]).to(dtype)


def _nf4_table(device: torch.device) -> Tensor:
    return torch.tensor(NF4_VALUES, device=device)


@torch.library.custom_op("keepstep::quantized_matmul", mutates_args=())
def quantized_matmul(
    x_mk: Tensor,
    codes: Tensor,
    scales: Tensor,
    rows: int,
    backward: bool,
    left_mr: Tensor | None,
    right_rn: Tensor | None,
) -> Tensor:
    """x · weightᵀ, or x · weight where `backward` is set, plus left · right where they are given."""
    if codes.dtype == FP8 and computes_fp8(x_mk):
        out_mn = _fp8_backward(x_mk, codes, scales) if backward else _fp8_forward(x_mk, codes, scales)
    else:
        weight_nk = dequantize(codes, scales, rows, x_mk.dtype)
        out_mn = torch.mm(x_mk, weight_nk if backward else weight_nk.t())
    return out_mn if left_mr is None or right_rn is None else out_mn.addmm_(left_mr, right_rn)


@quantized_matmul.register_fake
def _(
    x_mk: Tensor, codes: Tensor, scales: Tensor, rows: int, backward: bool, left_mr: Any, right_rn: Any  # noqa: ARG001
) -> Tensor:  # fmt: skip
    columns = codes.numel() * (1 if codes.dtype == FP8 else 2) // rows
    return x_mk.new_empty((x_mk.shape[0], columns if backward else rows))


def computes_fp8(x: Tensor) -> bool:
    """Whether matmuls with an fp8 weight run in fp8: on Hopper in bf16, and in tests of that form on a CPU."""
    if not x.is_cuda:
        return backend().fuses_matmuls(x)
    # A single token, as in decoding, is no work for the tensor cores.
    suits = x.dtype == torch.bfloat16 and x.shape[0] % FP8_MULTIPLE == 0
    return suits and is_hopper(x.device) and works("fp8 base", x.device, _fp8_difference)


def _fp8_forward(x_mk: Tensor, w8_nk: Tensor, scales_n: Tensor) -> Tensor:
    x8_mk, x_scales_m = quantize_tokens(x_mk, None)
    return _rowwise_gemm(x8_mk, w8_nk, x_scales_m, scales_n, x_mk.dtype, fast_sums=True)


def _fp8_backward(dy_mn: Tensor, w8_nk: Tensor, scales_n: Tensor) -> Tensor:
    dy8_mn, dy_scales_m = quantize_tokens(dy_mn, scales_n)
    w8_kn = transposed_fp8(w8_nk)
    ones_k = torch.ones(w8_kn.shape[0], dtype=torch.float32, device=dy_mn.device)
    return _rowwise_gemm(dy8_mn, w8_kn, dy_scales_m, ones_k, dy_mn.dtype, fast_sums=False)


def _rowwise_gemm(
    a8_mk: Tensor, b8_nk: Tensor, a_scales_m: Tensor, b_scales_n: Tensor, dtype: torch.dtype, *, fast_sums: bool
) -> Tensor:
    """a · bᵀ, each row of both sides with a scale of its own."""
    if not a8_mk.is_cuda:
        return (a8_mk.float() @ b8_nk.float().t() * a_scales_m[:, None] * b_scales_n).to(dtype)
    # As in models/linear.py: sums over a layer's inputs tolerate fast accumulation, gradients do not.
    return torch._scaled_mm(
        a8_mk, b8_nk.t(), a_scales_m[:, None], b_scales_n[None], out_dtype=dtype, use_fast_accum=fast_sums
    )


def quantize_tokens(x_mk: Tensor, factors_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens in fp8, each with a scale of its own; each column is multiplied by its factor before."""
    if x_mk.is_cuda and has_triton():
        from keepstep.models.kernels.quantized import quantize_rows

        return quantize_rows(x_mk.contiguous(), factors_k)
    return quantize_fp8(x_mk if factors_k is None else x_mk.float() * factors_k)


def transposed_fp8(w8_nk: Tensor) -> Tensor:
    """A matrix in fp8 with rows and columns exchanged in memory."""
    if w8_nk.is_cuda and has_triton():
        from keepstep.models.kernels.quantized import transpose_bytes

        return transpose_bytes(w8_nk)
    return w8_nk.view(torch.uint8).t().contiguous().view(w8_nk.dtype)


class _QuantizedMatmul(torch.autograd.Function):
    """The gradients of the input and of the adapters; the weight has none."""

    @staticmethod
    def forward(
        ctx: Any,
        x_mk: Tensor,
        codes: Tensor,
        scales: Tensor,
        rows: int,
        bias_n: Tensor | None,
        lora_a_rk: Tensor | None,
        lora_b_nr: Tensor | None,
    ) -> Tensor:
        ctx.rows = rows
        if lora_a_rk is None or lora_b_nr is None:
            ctx.save_for_backward(codes, scales)
            out_mn: Tensor = quantized_matmul(x_mk, codes, scales, rows, False, None, None)
        else:
            inner_mr = F.linear(x_mk, lora_a_rk)
            ctx.save_for_backward(codes, scales, x_mk, lora_a_rk, lora_b_nr, inner_mr)
            out_mn = quantized_matmul(x_mk, codes, scales, rows, False, inner_mr, lora_b_nr.t())
        return out_mn if bias_n is None else out_mn + bias_n

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        codes, scales, *adapters = ctx.saved_tensors
        dy_mn = gradients[0].contiguous()
        by_x, by_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        d_bias_n = dy_mn.sum(0) if by_bias else None
        if not adapters:
            dx_mk = quantized_matmul(dy_mn, codes, scales, ctx.rows, True, None, None) if by_x else None
            return dx_mk, None, None, None, d_bias_n, None, None
        x_mk, lora_a_rk, lora_b_nr, inner_mr = adapters
        d_inner_mr = torch.mm(dy_mn, lora_b_nr)
        dx_mk = quantized_matmul(dy_mn, codes, scales, ctx.rows, True, d_inner_mr, lora_a_rk) if by_x else None
        d_a_rk, d_b_nr = torch.mm(d_inner_mr.t(), x_mk), torch.mm(dy_mn.t(), inner_mr)
        return dx_mk, None, None, None, d_bias_n, d_a_rk, d_b_nr


def _nf4_difference(device: torch.device) -> float:
    """How far the kernel is from torch's operators."""
    from keepstep.models.kernels.quantized import dequantize_nf4

    codes, scales = quantize_nf4(_sample(device, 192, 256))
    ours = dequantize_nf4(codes, scales, _nf4_table(device), torch.bfloat16)
    return relative_difference([ours.view(-1)], [dequantize_nf4_by_torch(codes, scales, torch.bfloat16).view(-1)])


def _fp8_difference(device: torch.device) -> float:
    """How far both fp8 matmuls are from the same sums in fp32 over the same codes."""
    x_mk, dy_mn = _sample(device, 208, 256).bfloat16(), _sample(device, 208, 384).bfloat16()
    w8_nk, scales_n = quantize_fp8(_sample(device, 384, 256))
    ours = [_fp8_forward(x_mk, w8_nk, scales_n), _fp8_backward(dy_mn, w8_nk, scales_n)]
    (x8, x_scales), (dy8, dy_scales) = quantize_fp8(x_mk), quantize_fp8(dy_mn.float() * scales_n)
    forward = x8.float() @ w8_nk.float().t() * x_scales[:, None] * scales_n
    return relative_difference(ours, [forward, dy8.float() @ w8_nk.float() * dy_scales[:, None]])


def _sample(device: torch.device, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device)
