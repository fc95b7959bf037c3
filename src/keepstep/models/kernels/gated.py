"""Starting the kernels of gated.cu: the products of a gated feed-forward with the activation inside them.

Shape legend: m tokens, k hidden, f feed-forward width; a tensor [m, n = 2f] holds blocks of `width` gates' numbers,
then those of their ups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.models.kernels.cuda import tensor_map
from keepstep.models.kernels.proof import relative_difference, works
from keepstep.models.kernels.tiles import COLUMNS, DEPTH, ROWS, fits, start
from keepstep.models.swiglu import activate, activate_backward


def joins(left_mk: Tensor, ffn: int, width: int) -> bool:
    """Whether the kernels take this product: the same answer for both directions of one feed-forward."""
    m, k = left_mk.shape
    return fits(m, k, 2 * ffn, left_mk) and width % COLUMNS == 0 and works("gated", left_mk.device, _proof)


def gated_forward(x_mk: Tensor, gate_up_nk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """silu(gate) × up of x · gate_upᵀ, and the slopes that `gated_backward` wants."""
    (m, k), n = x_mk.shape, gate_up_nk.shape[0]
    slopes_mn, product_mf = x_mk.new_empty((m, n)), x_mk.new_empty((m, n // 2))
    # Runs of eight gates and their eight ups take turns, so that a thread's sums hold both sides of what it multiplies.
    weights = tensor_map(
        gate_up_nk,
        (k, 8, 2, width // 8, n // (2 * width)),
        (k, width * k, 8 * k, 2 * width * k),
        (DEPTH, 8, 2, COLUMNS // 2 // 16, 1),
    )
    start("gated", "gated_forward", x_mk, (weights, slopes_mn, product_mf), n // COLUMNS, width, n // 16)
    return product_mf, slopes_mn


def gated_backward(d_out_mk: Tensor, down_kf: Tensor, slopes_mn: Tensor, width: int) -> Tensor:
    """The gradient of x · gate_upᵀ, from that of the whole feed-forward."""
    (m, n), (k, f) = slopes_mn.shape, down_kf.shape
    d_fused_mn = torch.empty_like(slopes_mn)
    weights = tensor_map(down_kf, (f, k), (f,), (64, DEPTH))
    rows = tensor_map(slopes_mn, (n, m), (n,), (64, ROWS))
    start("gated", "gated_backward", d_out_mk, (weights, rows, slopes_mn, d_fused_mn), f // COLUMNS, width, f // 8)
    return d_fused_mn


def _proof(device: torch.device) -> float:
    """Both directions, at a size that gives each pair of blocks several tiles, and steps that pieces do not divide."""
    random = torch.Generator(device).manual_seed(1)
    m, k, f, width = 4608, 576, 2048, 512
    x_mk, d_out_mk = (torch.randn(m, k, device=device, generator=random).bfloat16() for _ in range(2))
    gate_up_nk, down_kf = (
        (torch.randn(shape, device=device, generator=random) * k**-0.5).bfloat16() for shape in ((2 * f, k), (k, f))
    )
    product_mf, slopes_mn = gated_forward(x_mk, gate_up_nk, width)
    d_fused_mn = gated_backward(d_out_mk, down_kf, slopes_mn, width)
    fused_mn = torch.mm(x_mk, gate_up_nk.t())
    expected = activate(fused_mn, width)[0], activate_backward(torch.mm(d_out_mk, down_kf), fused_mn, width)[0]
    return relative_difference((product_mf, d_fused_mn), expected)
