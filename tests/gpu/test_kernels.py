"""Every kernel against torch's own operators, at sizes like those of a training step. Needs a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepstep.config.schema import ModelConfig
from keepstep.models.attention import Attention
from keepstep.models.attention_context import make_context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.head import head_loss
from keepstep.models.kernels import cublaslt, gemm_tiles
from keepstep.models.kernels.attention_backward import HEAD_SIZES
from keepstep.models.kernels.attention_schedule import item_costs, item_order, make_block_mask, schedule_items
from keepstep.models.linear import Fp8Linear, fp8_matmul_backward, fp8_swiglu_mlp
from keepstep.models.mlp import make_mlp
from keepstep.models.norm import RMSNorm, add_norm, fp8_add_norm, fused_add_norm
from keepstep.models.ops import fp8, matmul
from keepstep.models.ops.backend import KernelBackend, backend, proven
from keepstep.models.ops.fp8 import BACKWARD, FORWARD, to_fp8
from keepstep.models.ops.fused_attention import ScoreRule, fused_attention, has_kernel, heads_attention
from keepstep.models.ops.fused_mlp import gelu_mlp_backward, gelu_mlp_forward, swiglu_mlp_backward, swiglu_mlp_forward
from keepstep.models.ops.matmul import matmul_add_forward
from keepstep.models.ops.qk_norm import split_norm_rope, split_norm_rope_backward
from keepstep.models.ops.rope import qkv_rope, qkv_rope_forward, split_apply_rope
from keepstep.models.ops.swiglu import activate, activate_backward, swiglu
from keepstep.models.ops.varlen_attention import (
    VarlenSpans,
    cu_seqlens_of,
    flash_supports,
    max_seqlen_of,
    varlen_attention,
)
from keepstep.models.positions import apply_rope
from keepstep.train.device import deterministic_kernels
from keepstep.train.optim.master_weights import bias_corrections, join, plain_update, split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels run on a GPU")
CUDA = torch.device("cuda")


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def test_kernels_of_a_block_and_of_the_optimizer_prove_themselves() -> None:
    tensor = torch.empty(1, device=CUDA)
    assert backend().has_cross_entropy(tensor)
    assert backend().has_cross_entropy_fp8(tensor)
    assert backend().has_adamw(tensor)
    for module in ("ops.fp8", "norm", "ops.rope", "ops.swiglu"):
        assert proven(module, tensor, importlib.import_module(f"keepstep.models.{module}")._prove), module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 300, 64, device=CUDA, dtype=dtype, requires_grad=True)
    weight = (torch.randn(50304, 64, device=CUDA) * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(0, 50257, (2, 300), device=CUDA)
    targets[0, :7] = -100
    reference = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    expected = F.cross_entropy(
        (reference[0] @ reference[1].t())[..., :50257].flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected.backward()
    for chunks in (1, 3):
        loss = head_loss(hidden, weight, targets, 50257, chunks)
        loss.backward()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        for ours, theirs in zip((hidden, weight), reference, strict=True):
            assert relative(ours.grad, theirs.grad) < tolerance
            ours.grad = None
        with torch.no_grad():
            assert head_loss(hidden, weight, targets, 50257, chunks).item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("chunks", [1, 3])
def test_head_with_gradients_in_fp8(chunks: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 2048, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(50304, 256, device=CUDA) * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, 50257, (2, 2048), device=CUDA)
    targets[0, :7] = -100
    found = []
    for in_fp8 in (False, True):
        loss = head_loss(hidden, weight, targets, 50257, chunks, fp8=in_fp8)
        found.append((loss, *torch.autograd.grad(loss, [hidden, weight])))
    (wide, *wide_gradients), (small, *small_gradients) = found
    assert small.item() == wide.item()
    for ours, theirs in zip(small_gradients, wide_gradients, strict=True):
        assert relative(ours, theirs) < 0.06
    assert (small_gradients[0][0, :7] == 0).all()
    assert (small_gradients[1][50257:] == 0).all()


@pytest.mark.parametrize("rows", [7, 32768])
def test_swiglu_forward_and_backward(rows: int) -> None:
    torch.manual_seed(2)
    fused = torch.randn(rows, 16384, device=CUDA, dtype=torch.bfloat16)
    dy = torch.randn(rows, 8192, device=CUDA, dtype=torch.bfloat16)
    gate, up = fused.float().unflatten(-1, (-1, 2, 1024)).unbind(-2)
    product = activate(fused, 1024)
    expected = (F.silu(gate) * up).flatten(-2)
    assert relative(product, expected) < 4e-3
    del gate, up, product, expected
    gradient = activate_backward(dy, fused, 1024)
    reference = activate_backward(dy[:64].cpu(), fused[:64].cpu(), 1024)
    assert relative(gradient[:64].cpu(), reference) < 4e-3


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize(("rows", "width"), [(32768, 1024), (8192, 1792)])
def test_swiglu_in_fp8_is_swiglu_then_rounded(rows: int, width: int, outlier: float) -> None:
    torch.manual_seed(2)
    fused = torch.randn(rows, 16 * width, device=CUDA, dtype=torch.bfloat16)
    # No row of the sample.
    fused[77] *= outlier
    dy = torch.randn(rows, 8 * width, device=CUDA, dtype=torch.bfloat16)
    for form, exact, dtype, limit in (
        (fp8.fp8_swiglu(fused, width), activate(fused, width), FORWARD, 0.03),
        (fp8.swiglu_gradient_to_fp8(dy, fused, width), activate_backward(dy, fused, width), BACKWARD, 0.06),
    ):
        straight, transposed, undo = form
        largest = exact.abs().max().item() / torch.finfo(dtype).max
        assert largest * 0.99 < undo.item() < (8 if outlier == 1 else 1.01) * largest
        assert torch.equal(transposed.view(torch.uint8).t(), straight.view(torch.uint8))
        assert relative(straight[:4096].float() * undo, exact[:4096]) < limit


def test_rms_norm_in_fp8_is_the_norm_then_rounded() -> None:
    torch.manual_seed(6)
    x, added = (torch.randn(4, 4096, 2048, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(2048, device=CUDA) + 0.5
    stream, rows = fp8_add_norm(x, added, weight, 1e-5)
    expected, normed = fused_add_norm(x, added, weight, 1e-5)
    assert torch.equal(stream, expected)
    assert relative(rows.straight_mk.float() * rows.undo, normed.flatten(0, 1)) < 0.03
    assert rows.straight_mk.float().abs().max() == torch.finfo(FORWARD).max
    assert torch.equal(rows.transposed_km.view(torch.uint8).t(), rows.straight_mk.view(torch.uint8))


def test_the_gated_fp8_form_at_full_size() -> None:
    torch.manual_seed(3)
    with CUDA:
        gate_up, down = Fp8Linear(2048, 16384, False).bfloat16(), Fp8Linear(8192, 2048, False).bfloat16()
    x = torch.randn(4, 4096, 2048, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 4096, 2048, device=CUDA, dtype=torch.bfloat16)

    def gradients(output: torch.Tensor) -> list[torch.Tensor]:
        return [output.detach(), *torch.autograd.grad(output, [x, gate_up.weight, down.weight], dy)]

    ours = gradients(fp8_swiglu_mlp(x, gate_up, down, 1024))
    apart = gradients(down(swiglu(gate_up(x), 1024)))
    dense = gradients(F.linear(swiglu(F.linear(x, gate_up.weight), 1024), down.weight))
    # Scales that differ in the last bit round differently: what counts is that neither form is further from the truth.
    for fused, plain, exact in zip(ours, apart, dense, strict=True):
        assert relative(fused, exact) < 0.12
        assert relative(fused, exact) < 1.1 * relative(plain, exact)


def test_adamw_on_split_weights() -> None:
    torch.manual_seed(4)
    size = 1_000_003
    whole = torch.randn(size, device=CUDA)
    start = [*split(whole), torch.randn(size, device=CUDA), torch.rand(size, device=CUDA)]
    gradient, factor = torch.randn(size, device=CUDA, dtype=torch.bfloat16), torch.tensor(0.7, device=CUDA)
    corrections = bias_corrections(torch.tensor(3.0, device=CUDA), (0.9, 0.95))
    settings = {"lr": 0.1, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "corrections": corrections}
    from keepstep.models.kernels.optimizer import adamw_

    ours, theirs = ([part.clone() for part in start] for _ in range(2))
    adamw_((ours[0], ours[1]), gradient, (ours[2], ours[3]), factor, **settings)  # type: ignore[arg-type]
    plain_update((theirs[0], theirs[1]), gradient, (theirs[2], theirs[3]), factor, settings)
    assert torch.equal(join(start[0], start[1]), whole)
    torch.testing.assert_close(join(ours[0], ours[1]), join(theirs[0], theirs[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-5, atol=1e-5)
    # A factor that is not a number: nothing may change.
    before = [part.clone() for part in ours]
    adamw_((ours[0], ours[1]), gradient, (ours[2], ours[3]), factor * float("nan"), **settings)  # type: ignore[arg-type]
    assert all(torch.equal(part, kept) for part, kept in zip(ours, before, strict=True))


@pytest.mark.parametrize("with_added", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(32768, 2048), (300, 4096), (5, 96)])
def test_residual_sum_and_norm_forward_and_backward(rows: int, width: int, with_added: bool) -> None:
    torch.manual_seed(5)
    norm = RMSNorm(width, 1e-5).to(CUDA, torch.bfloat16)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    parts = [torch.randn(1, rows, width, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    x, added = parts[0].requires_grad_(), parts[1].requires_grad_() if with_added else None
    exact = [part.detach().double().requires_grad_() for part in (x, norm.weight, *([added] if with_added else []))]  # type: ignore[union-attr]
    ours = add_norm(x, added, norm)
    stream = exact[0] + exact[2] if with_added else exact[0] * 1
    # The kernel normalises the sum as it was stored, in bf16.
    stream = stream + (ours[0].detach().double() - stream).detach()
    theirs = (stream, F.rms_norm(stream, (width,), exact[1], 1e-5))
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 4e-3
    wanted = [x, norm.weight, *([added] if with_added else [])]
    gradients = torch.autograd.grad(ours, wanted, parts[2:])  # type: ignore[arg-type]
    expected = torch.autograd.grad(theirs, exact, [part.double() for part in parts[2:]])
    for a, b in zip(gradients, expected, strict=True):
        assert relative(a, b) < 6e-3


@pytest.mark.parametrize(("groups", "queries", "size", "tables"), [(8, 4, 64, 1), (3, 1, 96, 2), (2, 8, 128, 2)])
def test_rotary_with_the_split_of_the_projection(groups: int, queries: int, size: int, tables: int) -> None:
    torch.manual_seed(6)
    qkv = torch.randn(2, 700, groups * (queries + 2) * size, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    angle = torch.rand(tables, 700, size // 2, device=CUDA) * 6
    theirs_in = qkv.detach().cpu().requires_grad_()
    ours = split_apply_rope(qkv, angle.cos(), angle.sin(), queries, size)
    theirs = split_apply_rope(theirs_in, angle.cpu().cos(), angle.cpu().sin(), queries, size)
    # Attention hands gradients back head by head: strides that are not those of the parts.
    gradients = [torch.randn_like(part.transpose(1, 2).contiguous()).transpose(1, 2) for part in ours]
    back = torch.autograd.grad(ours, qkv, gradients)[0]
    wanted = torch.autograd.grad(theirs, theirs_in, [gradient.cpu() for gradient in gradients])[0]
    for a, b in zip((*ours, back), (*theirs, wanted), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(1000, 600), (1041, 144), (1, 64), (32768, 2048), (8192, 14336)])
@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_fp8_with_its_scale_and_its_transpose(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    x = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    small, transposed, undo = to_fp8(x, dtype)
    if len(x) < 2 * fp8.SAMPLED_ROWS:
        assert small.float().abs().max() == torch.finfo(dtype).max
    assert transposed.is_contiguous()
    assert torch.equal(transposed.view(torch.uint8).t(), small.view(torch.uint8))
    assert relative(small.float() * undo, x) < (0.04 if dtype == FORWARD else 0.07)
    # More often than zeros are written at a time.
    for _ in range(70 if len(x) < 2000 else 2):
        again = to_fp8(x, dtype)
        assert torch.equal(again[1].view(torch.uint8), transposed.view(torch.uint8))
        assert again[2] == undo


def test_fp8_gradients_over_many_tokens_are_added_up_in_full() -> None:
    torch.manual_seed(8)
    x, dy = (torch.randn(32768, 512, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    (_, x8_km, x_inv_scale), (_, w8_kn, w_inv_scale) = to_fp8(x, FORWARD), to_fp8(dy[:512], FORWARD)
    _, d_weight = fp8_matmul_backward(dy + x, x8_km, x_inv_scale, w8_kn, w_inv_scale)
    dy8_nm, dy_inv_scale = to_fp8(dy + x, BACKWARD)[1:]
    exact = (dy8_nm.double() @ x8_km.double().t()) * (dy_inv_scale.double() * x_inv_scale.double())
    # Fast sums would be 8% off.
    assert relative(d_weight, exact) < 5e-3


@pytest.mark.parametrize("fast_sums", [True, False])
def test_a_chosen_fp8_product_has_the_bits_of_torchs_own(fast_sums: bool) -> None:
    torch.manual_seed(9)
    a8, _, a_inv_scale = to_fp8(torch.randn(32768, 2048, device=CUDA, dtype=torch.bfloat16), FORWARD)
    b8, _, b_inv_scale = to_fp8(torch.randn(16384, 2048, device=CUDA, dtype=torch.bfloat16), FORWARD)
    scales = {"scale_a": a_inv_scale, "scale_b": b_inv_scale}
    expected = torch._scaled_mm(a8, b8.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast_sums)
    for _ in range(2):
        assert torch.equal(
            matmul.scaled_gemm(a8, b8, a_inv_scale, b_inv_scale, torch.bfloat16, fast_sums=fast_sums), expected
        )
    # Scales belong to the call, not to the choice.
    assert torch.equal(
        matmul.scaled_gemm(a8, b8, a_inv_scale * 2, b_inv_scale, torch.bfloat16, fast_sums=fast_sums), expected * 2
    )
    small = matmul.scaled_gemm(a8[:64], b8[:32], a_inv_scale, b_inv_scale, torch.bfloat16, fast_sums=fast_sums)
    assert relative(small, expected[:64, :32]) < 1e-2


@pytest.mark.parametrize("by_columns", [(False, True), (False, False), (True, False)])
def test_a_chosen_product_has_the_bits_of_torchs_own(
    by_columns: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(matmul, "_WORTH_A_CHOICE", 1 << 36)
    monkeypatch.setattr(cublaslt, "cache_folder", lambda: tmp_path)
    # Any other way than torch's own will do.
    monkeypatch.setattr(cublaslt, "_WORTH", 9.0)
    torch.manual_seed(15)
    shapes = [
        shape[::-1] if transposed else shape
        for shape, transposed in zip(((6144, 3072), (3072, 4096)), by_columns, strict=True)
    ]
    a, b = (torch.randn(shape, device=CUDA).bfloat16() for shape in shapes)
    a, b = (side.t() if transposed else side for side, transposed in zip((a, b), by_columns, strict=True))
    out = a.new_empty((6144, 4096))
    for _ in range(2):
        assert torch.equal(matmul.matmul_into(out.zero_(), a, b), torch.mm(a, b))
        # The second time by what was kept.
        assert all(kept is not None for kept in matmul._choices.values())
        matmul._choices.clear()
    assert len(list(tmp_path.glob("choices/*"))) == 1


def test_a_matrix_is_added_inside_its_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cublaslt, "cache_folder", lambda: tmp_path)
    torch.manual_seed(16)
    left, weight = torch.randn(32768, 1152, device=CUDA).bfloat16(), torch.randn(2048, 1152, device=CUDA).bfloat16()
    residual = torch.randn(32768, 2048, device=CUDA).bfloat16()
    before = residual.clone()
    found = matmul_add_forward(left, weight, residual)
    assert any(key[5] is False and kept is not None for key, kept in matmul._choices.items())
    expected = residual.float() + left.float() @ weight.float().t()
    assert relative(found, expected) < 2e-3
    assert torch.equal(residual, before)
    assert torch.equal(found, matmul_add_forward(left, weight, residual))


def spans_of(documents: torch.Tensor) -> VarlenSpans:
    cu_seqlens = cu_seqlens_of(documents.cpu().numpy())
    return VarlenSpans(torch.from_numpy(cu_seqlens).to(CUDA), max_seqlen_of(cu_seqlens, documents.shape[1]))


@pytest.mark.parametrize("window", [0, 100, 4096])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("default")
def test_flash_attention_inside_documents(compiled: bool, window: int) -> None:
    torch.manual_seed(10)
    documents = torch.randint(0, 9, (4, 2048), device=CUDA).sort(dim=1).values
    spans = spans_of(documents)
    assert 128 <= spans.max_seqlen < 2048
    parts = [torch.randn(4, 2048, heads, 64, device=CUDA, dtype=torch.bfloat16) for heads in (32, 8, 8)]
    allowed = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    if window:
        allowed = allowed.triu(1 - window)
    exact = [part.float().requires_grad_() for part in parts]
    expected = F.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in exact), attn_mask=allowed, enable_gqa=True
    ).transpose(1, 2)
    gradient = torch.randn_like(expected)
    ours = [part.clone().requires_grad_() for part in parts]
    way = torch.compile(varlen_attention) if compiled else varlen_attention
    found = way(*ours, spans, window)
    assert relative(found, expected) < 1e-2
    theirs = torch.autograd.grad(expected, exact, gradient)
    for one, other in zip(torch.autograd.grad(found, ours, gradient.bfloat16()), theirs, strict=True):
        assert relative(one, other) < 2e-2


def test_documents_of_one_token_are_documents() -> None:
    torch.manual_seed(11)
    documents = torch.arange(200, device=CUDA).expand(3, -1)
    query, key, value = (torch.randn(3, 200, heads, 64, device=CUDA, dtype=torch.bfloat16) for heads in (8, 2, 2))
    found = varlen_attention(query, key, value, spans_of(documents))
    assert torch.equal(found, value.repeat_interleave(4, dim=2))


@pytest.mark.parametrize("window", [0, 100])
def test_flash_attention_inside_documents_repeats_its_bits_where_they_must(window: int) -> None:
    torch.manual_seed(12)
    spans = spans_of(torch.randint(0, 9, (4, 2048), device=CUDA).sort(dim=1).values)
    parts = [
        torch.randn(4, 2048, heads, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for heads in (32, 8, 8)
    ]
    gradient = torch.randn_like(parts[0])
    first: list[torch.Tensor] = []
    with deterministic_kernels():
        for _ in range(5):
            found = varlen_attention(*parts, spans, window)
            results = [found, *torch.autograd.grad(found, parts, gradient)]
            first = first or results
            assert all(torch.equal(one, other) for one, other in zip(results, first, strict=True))


@pytest.mark.parametrize(
    ("dtype", "head_size", "takes"),
    [
        (torch.bfloat16, 64, True),
        (torch.float16, 128, True),
        (torch.bfloat16, 256, True),
        (torch.float32, 64, False),
        (torch.bfloat16, 60, False),
        (torch.bfloat16, 264, False),
    ],
)
def test_what_the_flash_kernel_takes(dtype: torch.dtype, head_size: int, takes: bool) -> None:
    assert flash_supports(CUDA, dtype, head_size) == takes
    with sdpa_kernel(SDPBackend.MATH):
        assert not flash_supports(CUDA, dtype, head_size)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="written for Hopper GPUs"
)


@hopper
@pytest.mark.parametrize(("tokens", "hidden", "ffn", "width"), [(256, 512, 512, 256), (14336, 1088, 3072, 1536)])
def test_swiglu_inside_its_products(tokens: int, hidden: int, ffn: int, width: int) -> None:
    # One pair of row tiles, then more tiles than the GPU has room for at once, and steps that pieces do not divide.
    torch.manual_seed(10)
    x, d_out = (torch.randn(tokens, hidden, device=CUDA).bfloat16() for _ in range(2))
    gate_up = (torch.randn(2 * ffn, hidden, device=CUDA) * 0.05).bfloat16()
    down = (torch.randn(hidden, ffn, device=CUDA) * 0.05).bfloat16()
    assert gemm_tiles.can_fuse_swiglu(x, ffn, width)
    product, slopes = swiglu_mlp_forward(x, gate_up, width)
    fused = torch.mm(x, gate_up.t())
    assert relative(product, activate(fused, width)) < 3e-3
    d_fused = swiglu_mlp_backward(d_out, down, slopes, width)
    assert relative(d_fused, activate_backward(torch.mm(d_out, down), fused, width)) < 4e-3
    assert torch.equal(d_fused, swiglu_mlp_backward(d_out, down, slopes, width))


@hopper
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("tokens", "hidden", "ffn", "biased"), [(256, 512, 256, True), (14336, 1088, 3072, False)])
def test_gelu_inside_its_products(tokens: int, hidden: int, ffn: int, biased: bool, approximate: str) -> None:
    torch.manual_seed(10)
    x, d_out = (torch.randn(tokens, hidden, device=CUDA).bfloat16() for _ in range(2))
    up = (torch.randn(ffn, hidden, device=CUDA) * 0.1).bfloat16()
    down = (torch.randn(hidden, ffn, device=CUDA) * 0.05).bfloat16()
    # A bias that begins between two places where eight numbers could be read at once.
    bias = torch.randn(ffn + 1, device=CUDA).bfloat16()[1:] if biased else None
    assert gemm_tiles.can_fuse_gelu(x, ffn)
    by_tanh = approximate == "tanh"
    activation, slopes = gelu_mlp_forward(x, up, bias, by_tanh)
    wide = F.linear(x, up, bias).float()
    assert relative(activation, F.gelu(wide, approximate=approximate)) < 4e-3
    d_wide = gelu_mlp_backward(d_out, down, slopes, by_tanh)
    expected = torch.ops.aten.gelu_backward(torch.mm(d_out, down).float(), wide, approximate=approximate)
    assert relative(d_wide, expected) < 5e-3
    assert torch.equal(d_wide, gelu_mlp_backward(d_out, down, slopes, by_tanh))


@hopper
@pytest.mark.parametrize("hidden", [512, 576, 1088])
def test_fused_products_of_small_depth_repeat_their_bits(hidden: int) -> None:
    # With few steps the warps that finish tiles are the slow ones, and run far apart from each other.
    torch.manual_seed(12)
    tokens, ffn, width = 14336, 3072, 1536
    x, d_out = (torch.randn(tokens, hidden, device=CUDA).bfloat16() for _ in range(2))
    up, gate_up = ((torch.randn(rows, hidden, device=CUDA) * 0.05).bfloat16() for rows in (ffn, 2 * ffn))
    down = (torch.randn(hidden, ffn, device=CUDA) * 0.05).bfloat16()
    first: list[torch.Tensor] = []
    for _ in range(100):
        activation, slopes = gelu_mlp_forward(x, up, None, True)
        product, gated_slopes = swiglu_mlp_forward(x, gate_up, width)
        d_wide = gelu_mlp_backward(d_out, down, slopes, True)
        d_fused = swiglu_mlp_backward(d_out, down, gated_slopes, width)
        now = [activation, slopes, d_wide, product, gated_slopes, d_fused]
        first = first or now
        assert all(torch.equal(one, other) for one, other in zip(first, now, strict=True))
    assert relative(first[2], torch.mm(d_out, down).float() * first[1].float()) < 5e-3


@hopper
def test_gelu_of_every_number() -> None:
    # The product with 1 is the number itself: all bf16 numbers of ordinary size, in rows of their own.
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=CUDA).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.abs() < 64]
    x = torch.zeros((numbers.numel() + 255) // 256 * 256, 512, device=CUDA, dtype=torch.bfloat16)
    x[: numbers.numel(), 0] = numbers
    up = torch.zeros(256, 512, device=CUDA, dtype=torch.bfloat16)
    up[:, 0] = 1
    for by_tanh, approximate in ((False, "none"), (True, "tanh")):
        value = numbers.double().requires_grad_()
        expected = F.gelu(value, approximate=approximate)
        (slope,) = torch.autograd.grad(expected.sum(), value)
        ours = gelu_mlp_forward(x, up, None, by_tanh)
        for part, truth in zip(ours, (expected.detach(), slope), strict=True):
            got = part[: numbers.numel(), 7].double()
            assert ((got - truth).abs() <= 0.005 * truth.abs() + 1e-6).all()


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "gelu_tanh"])
def test_feed_forward_on_a_gpu_is_the_one_of_plain_operators(kind: Any) -> None:
    torch.manual_seed(11)
    biased = kind != "swiglu"
    shape = ModelConfig(hidden=512, heads=8, kv_heads=4, ffn_hidden=1024, activation=kind, bias=biased)
    mlp = make_mlp(shape).to(CUDA, torch.bfloat16)
    x = torch.randn(2, 256, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    outcomes = []
    for fused in (True, False):
        mlp.plan = BlockPlan(fused_matmuls=fused)
        for tensor in (x, *mlp.parameters()):
            tensor.grad = None
        output = mlp(x)
        output.backward(gradient)
        outcomes.append([output, x.grad, *(parameter.grad for parameter in mlp.parameters())])
    for ours, theirs in zip(*outcomes, strict=True):
        assert relative(ours, theirs) < 5e-3


@hopper
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("rows", "tokens", "tables", "queries", "hidden"), [(1, 256, 1, 2, 512), (7, 4096, 7, 4, 1088)]
)
def test_positions_inside_the_projection(
    rows: int, tokens: int, tables: int, queries: int, hidden: int, size: int
) -> None:
    torch.manual_seed(12)
    x = torch.randn(rows, tokens, hidden, device=CUDA).bfloat16()
    weight = (torch.randn(4 * (queries + 2) * size, hidden, device=CUDA) * 0.05).bfloat16()
    angle = torch.rand(tables, tokens, size // 2, device=CUDA) * 100
    assert gemm_tiles.can_fuse_rope(x.flatten(0, 1), len(weight), size)
    ours = qkv_rope_forward(x, weight, angle.cos(), angle.sin(), queries, size)
    theirs = split_apply_rope(torch.matmul(x, weight.t()), angle.cos(), angle.sin(), queries, size)
    for one, other in zip(ours, theirs, strict=True):
        assert relative(one, other) < 3e-3
    again = qkv_rope_forward(x, weight, angle.cos(), angle.sin(), queries, size)
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
    x.requires_grad_(), weight.requires_grad_()
    seeds = [torch.randn_like(part) for part in ours]
    joined = torch.autograd.grad(qkv_rope(x, weight, angle.cos(), angle.sin(), queries, size), (x, weight), seeds)
    apart = split_apply_rope(torch.matmul(x, weight.t()), angle.cos(), angle.sin(), queries, size)
    for one, other in zip(joined, torch.autograd.grad(apart, (x, weight), seeds), strict=True):
        assert relative(one, other) < 3e-3


def exact_attention(
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    queries: int,
    size: int,
    visible: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over a fused projection in the precision of its input."""
    grouped = qkv.unflatten(-1, (-1, queries + 2, size))
    sides = [grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]]
    if tables:
        sides[:2] = [apply_rope(side, *tables) for side in sides[:2]]
    sides[0] = sides[0].flatten(2, 3)
    with sdpa_kernel(SDPBackend.MATH):
        query, key, value = (side.transpose(1, 2) for side in sides)
        attn_out = F.scaled_dot_product_attention(
            query, key, value, visible, is_causal=visible is None, scale=scale, enable_gqa=True
        )
    return attn_out.transpose(1, 2).flatten(2)


def check_gradients(gradient: torch.Tensor, expected: torch.Tensor, queries: int, size: int, slack: float) -> None:
    """Of queries, keys and values: each as a whole, and no single token or head is off by `slack` of the mean.

    Rounding attention's output to bf16 alone, with all else in fp32, is off by up to 0.016 of the mean with heads of 64
    and 0.024 with heads of 128.
    """
    parts = [whole.unflatten(-1, (-1, queries + 2, size)) for whole in (gradient, expected)]
    for place in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        one, other = (part[..., place, :] for part in parts)
        assert relative(one, other) < 1e-2
        assert ((one - other).norm(dim=-1) < 0.1 * other.norm(dim=-1) + slack * other.norm(dim=-1).mean()).all()


@hopper
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(
    ("rows", "tokens", "groups", "queries", "table_rows"),
    [
        (1, 128, 1, 1, 1),
        (700, 128, 1, 1, 1),
        (60, 256, 8, 1, 0),
        (2, 384, 3, 1, 0),
        (3, 1024, 2, 3, 3),
        (2, 4096, 8, 4, 1),
    ],
)
def test_attention_backward_matches_fp32(
    rows: int, tokens: int, groups: int, queries: int, table_rows: int, size: int
) -> None:
    torch.manual_seed(13)
    assert has_kernel(CUDA, size)
    qkv = torch.randn(rows, tokens, groups * (queries + 2) * size, device=CUDA).bfloat16().requires_grad_()
    angle = torch.rand(table_rows, tokens, size // 2, device=CUDA) * 100
    tables = (angle.cos(), angle.sin()) if table_rows else None
    ours = fused_attention(qkv, tables, queries, size)
    seed = torch.randn_like(ours)
    (gradient,) = torch.autograd.grad(ours, qkv, seed)
    exact = qkv.detach().float().requires_grad_()
    theirs = exact_attention(exact, tables, queries, size)
    (expected,) = torch.autograd.grad(theirs, exact, seed.float())
    assert relative(ours, theirs) < 5e-3
    check_gradients(gradient, expected, queries, size, slack={64: 0.02, 128: 0.03}[size])


@hopper
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(
    ("rows", "tokens", "groups", "queries", "most", "window", "scale"),
    [
        (2, 1024, 2, 4, 1, 0, None),
        (3, 1024, 4, 1, 9, 0, None),
        (3, 1024, 2, 3, 300, 0, None),
        (60, 256, 8, 1, 5, 0, None),
        (4, 1024, 8, 2, 5, 200, 0.05),
        (1, 4096, 2, 2, 1, 1, None),
        (1, 4096, 2, 2, 1, 128, None),
        (1, 4096, 2, 2, 1, 512, None),
        (1, 4096, 2, 2, 1, 4096, None),
        (1, 4096, 2, 2, 4, 512, None),
    ],
)
def test_attention_backward_stays_in_documents_and_windows(
    rows: int, tokens: int, groups: int, queries: int, most: int, window: int, scale: float | None, size: int
) -> None:
    torch.manual_seed(18)
    assert has_kernel(CUDA, size, masked=True)
    documents = torch.randint(0, most, (rows, tokens), device=CUDA).sort(dim=1).values
    cu_seqlens, longest, *_ = spans_of(documents)
    mask = make_block_mask(cu_seqlens, rows, tokens, window, groups)
    costs = item_costs(mask.query_ends_bk, groups)
    lists = schedule_items(item_order(costs, tokens // 128).tolist(), costs.tolist(), len(mask.lists_pi))
    assert [items[: items.index(-1)] for items in mask.lists_pi.tolist()] == lists
    qkv = torch.randn(rows, tokens, groups * (queries + 2) * size, device=CUDA).bfloat16().requires_grad_()
    angle = torch.rand(rows, tokens, size // 2, device=CUDA) * 100
    tables = angle.cos(), angle.sin()
    ours = fused_attention(qkv, tables, queries, size, ScoreRule(scale, window, longest, cu_seqlens, *mask))
    seed = torch.randn_like(ours)
    (gradient,) = torch.autograd.grad(ours, qkv, seed, retain_graph=True)
    for _ in range(5):
        assert torch.autograd.grad(ours, qkv, seed, retain_graph=True)[0].equal(gradient)
    visible = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    exact = qkv.detach().float().requires_grad_()
    theirs = exact_attention(exact, tables, queries, size, visible.triu(1 - window) if window else visible, scale)
    (expected,) = torch.autograd.grad(theirs, exact, seed.float())
    assert relative(ours, theirs) < 5e-3
    if window == 1:
        # One key: its weight is 1, so neither queries nor keys have a gradient.
        others, found = (whole.unflatten(-1, (-1, queries + 2, size)) for whole in (expected, gradient))
        assert relative(found[..., -1, :], others[..., -1, :]) < 1e-2
        assert found[..., :-1, :].norm(dim=-1).max() < 1e-2 * found[..., -1, :].norm(dim=-1).mean()
        return
    check_gradients(gradient, expected, queries, size, slack=0.04)


@hopper
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [96, 112])
def test_attention_backward_of_padded_heads_matches_fp32(size: int, masked: bool) -> None:
    torch.manual_seed(21)
    documents = torch.randint(0, 5 if masked else 1, (2, 1024), device=CUDA).sort(dim=1).values
    rule = ScoreRule()
    if masked:
        cu_seqlens, longest, *_ = spans_of(documents)
        rule = ScoreRule(None, 0, longest, cu_seqlens, *make_block_mask(cu_seqlens, 2, 1024, 0, 4))
    shapes = [(2, 1024, heads, size) for heads in (12, 4, 4)]
    parts = [torch.randn(shape, device=CUDA).bfloat16().requires_grad_() for shape in shapes]
    ours = heads_attention(*parts, rule)
    seed = torch.randn_like(ours)
    found = torch.autograd.grad(ours, parts, seed, retain_graph=True)
    for _ in range(5):
        assert all(map(torch.equal, torch.autograd.grad(ours, parts, seed, retain_graph=True), found))
    exact = [part.detach().float().requires_grad_() for part in parts]
    visible = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    sides = (part.transpose(1, 2) for part in exact)
    theirs = F.scaled_dot_product_attention(*sides, visible, enable_gqa=True).transpose(1, 2).flatten(2)
    assert relative(ours, theirs) < 5e-3
    for one, other in zip(found, torch.autograd.grad(theirs, exact, seed.float()), strict=True):
        assert relative(one, other) < 0.02


@hopper
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(("rows", "tokens", "groups", "queries"), [(700, 128, 1, 1), (2, 2048, 4, 1), (8, 4096, 8, 4)])
def test_attention_backward_repeats_its_bits(rows: int, tokens: int, groups: int, queries: int, size: int) -> None:
    torch.manual_seed(15)
    qkv = torch.randn(rows, tokens, groups * (queries + 2) * size, device=CUDA).bfloat16().requires_grad_()
    attn_out = fused_attention(qkv, None, queries, size)
    seed = torch.randn_like(attn_out)
    (first,) = torch.autograd.grad(attn_out, qkv, seed, retain_graph=True)
    for _ in range(20):
        assert torch.autograd.grad(attn_out, qkv, seed, retain_graph=True)[0].equal(first)


@hopper
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_attention_backward_keeps_precision_with_outliers(size: int) -> None:
    """The integer scale of queries' gradients comes from a bound: a few huge keys and values make it far too large."""
    torch.manual_seed(16)
    qkv = torch.randn(1, 1024, 4 * size, device=CUDA)
    qkv[:, 5, 2 * size : 2 * size + 3] = 60.0
    qkv[:, 7, 3 * size :] *= 50.0
    qkv = qkv.bfloat16().requires_grad_()
    seed = torch.randn(1, 1024, 2 * size, device=CUDA).bfloat16()
    (gradient,) = torch.autograd.grad(fused_attention(qkv, None, 2, size), qkv, seed)
    exact = qkv.detach().float().requires_grad_()
    query, key, value = exact.unflatten(-1, (4, size)).transpose(1, 2).split([2, 1, 1], dim=1)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    (expected,) = torch.autograd.grad(theirs.transpose(1, 2).flatten(2), exact, seed.float())
    assert relative(gradient[..., : 2 * size], expected[..., : 2 * size]) < 1e-2


@hopper
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attention_backward_passes_numbers_on_that_are_not_finite(value: float) -> None:
    qkv = torch.randn(1, 128, 3 * 64, device=CUDA).bfloat16().requires_grad_()
    seed = torch.randn(1, 128, 64, device=CUDA).bfloat16()
    seed[0, 100, 3] = value
    (gradient,) = torch.autograd.grad(fused_attention(qkv, None, 1, 64), qkv, seed)
    assert not gradient[0, 100, :64].isfinite().any()


@hopper
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_fused_attention_trains_like_plain_attention(size: int, qk_norm: bool) -> None:
    heads = 512 // size
    shape = {"hidden": 512, "heads": heads, "kv_heads": heads // 4, "seq_len": 1024, "positions": "rotary"}
    config = ModelConfig(**shape, bias=False, qk_norm=qk_norm)
    torch.manual_seed(14)
    attention = Attention(config, 0).to(CUDA, torch.bfloat16)
    x = torch.randn(2, 1024, 512, device=CUDA).bfloat16().requires_grad_()
    context = make_context(config, x, torch.arange(1024, device=CUDA).expand(2, -1), None, None)
    seed, outcomes = torch.randn_like(x), []
    for fused in (True, False):
        attention.plan = BlockPlan(fused_attention=fused)
        output = torch.compile(attention)(x, context)
        outcomes.append([output, *torch.autograd.grad(output, [x, *attention.parameters()], seed)])
    for ours, theirs in zip(*outcomes, strict=True):
        assert relative(ours, theirs) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_fixed_point_sums_have_the_bits_of_torchs_operators(dtype: torch.dtype, first: bool) -> None:
    torch.manual_seed(17)
    # From far below one step to numbers that are whole already, halves between two steps included.
    gradient = (torch.randn(100_003, device=CUDA) * torch.logspace(-18, 2, 100_003, device=CUDA)).to(dtype)
    gradient[:4] = torch.tensor([0.5, 1.5, -2.5, 3.5], device=CUDA) * 2.0**-50
    start = torch.randint(-(2**60), 2**60, (100_003,), device=CUDA)
    outcomes = []
    for device in (CUDA, torch.device("cpu")):
        total, largest = start.to(device).clone(), torch.zeros((), device=device)
        KernelBackend().add_fixed_point_(total, gradient.to(device), largest, 2.0**50, first)
        outcomes.append((total.cpu(), largest.cpu()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outcomes, strict=True))
    gradient[5] = float("nan")
    largest = torch.zeros((), device=CUDA)
    KernelBackend().add_fixed_point_(start, gradient, largest, 2.0**50, first)
    assert not largest.isfinite()


@pytest.mark.parametrize(("size", "queries", "groups", "per_head"), [(128, 8, 4, True), (128, 1, 16, False)])
@pytest.mark.parametrize("rotated", [True, False])
def test_norms_of_queries_and_keys(size: int, queries: int, groups: int, per_head: bool, rotated: bool) -> None:
    torch.manual_seed(2)
    width = groups * (queries + 2) * size
    qkv, gradient = (torch.randn(2, 3000, width).bfloat16() for _ in range(2))
    widths = (size, size) if per_head else (groups * queries * size, groups * size)
    weights = [(1 + torch.randn(count) / 4).bfloat16() for count in widths]
    angle = torch.rand(2, 3000, size // 2) * 100
    tables = (angle.cos(), angle.sin()) if rotated else (None, None)

    def results(device: torch.device) -> list[torch.Tensor]:
        rest = [None if item is None else item.to(device) for item in (*weights, *tables)]
        forward = split_norm_rope(qkv.to(device), *rest, queries, size, 1e-6)
        backward = split_norm_rope_backward(gradient.to(device), qkv.to(device), *rest, queries, size, 1e-6)
        return [part.cpu() for part in (*forward, *backward)]

    ours, again = results(CUDA), results(CUDA)
    assert all(one.equal(other) for one, other in zip(ours, again, strict=True))
    for one, other in zip(ours, results(torch.device("cpu")), strict=True):
        assert relative(one, other) < 5e-3
