"""Starting the kernels of activated.cu: the products of a plain feed-forward with GELU inside them.

Shape legend: m tokens, k hidden, f feed-forward width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.kernels.cuda import tensor_map
from keepstep.models.kernels.proof import relative_difference, works
from keepstep.models.kernels.tiles import COLUMNS, DEPTH, ROWS, fits, right_map, start

_ALIGNED_BYTES = 16
"""Of eight numbers that are read at once: a part of a larger tensor may begin anywhere."""


def joins(left_mk: Tensor, ffn: int) -> bool:
    """Whether the kernels take this product: the same answer for both directions of one feed-forward."""
    m, k = left_mk.shape
    return fits(m, k, ffn, left_mk) and ffn % COLUMNS == 0 and works("activated", left_mk.device, _proof)


def activated_forward(x_mk: Tensor, up_fk: Tensor, bias_f: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:
    """GELU of x · upᵀ + bias, and the slopes that `activated_backward` wants."""
    m, f = x_mk.shape[0], up_fk.shape[0]
    activation_mf, slopes_mf = x_mk.new_empty((m, f)), x_mk.new_empty((m, f))
    if bias_f is not None and bias_f.data_ptr() % _ALIGNED_BYTES:
        bias_f = bias_f.clone()
    others = (right_map(up_fk), bias_f, activation_mf, slopes_mf)
    start("activated", "activated_forward", x_mk, others, f // COLUMNS, f // 8, int(by_tanh))
    return activation_mf, slopes_mf


def activated_backward(d_out_mk: Tensor, down_kf: Tensor, slopes_mf: Tensor) -> Tensor:
    """The gradient of x · upᵀ + bias, from that of the whole feed-forward."""
    (m, f), k = slopes_mf.shape, down_kf.shape[0]
    d_wide_mf = torch.empty_like(slopes_mf)
    weights = tensor_map(down_kf, (f, k), (f,), (64, DEPTH))
    rows = tensor_map(slopes_mf, (f, m), (f,), (64, ROWS))
    start("activated", "activated_backward", d_out_mk, (weights, rows, slopes_mf, d_wide_mf), f // COLUMNS, f // 8)
    return d_wide_mf


def _proof(device: torch.device) -> float:
    """Both directions, at a size that gives each pair of blocks several tiles, and steps that pieces do not divide."""
    random = torch.Generator(device).manual_seed(1)
    m, k, f = 4608, 576, 2048
    x_mk, d_out_mk = (torch.randn(m, k, device=device, generator=random).bfloat16() for _ in range(2))
    up_fk, down_kf = (
        (torch.randn(shape, device=device, generator=random) * k**-0.5).bfloat16() for shape in ((f, k), (k, f))
    )
    bias_f = torch.randn(f, device=device, generator=random).bfloat16()
    wide_mf, dy_mf = torch.addmm(bias_f, x_mk, up_fk.t()), torch.mm(d_out_mk, down_kf)
    ours, expected = [], []
    for by_tanh, name in ((False, "none"), (True, "tanh")):
        activation_mf, slopes_mf = activated_forward(x_mk, up_fk, bias_f, by_tanh)
        ours += [activation_mf, activated_backward(d_out_mk, down_kf, slopes_mf)]
        backward = torch.ops.aten.gelu_backward(dy_mf, wide_mf, approximate=name)
        expected += [F.gelu(wide_mf, approximate=name), backward]
    return relative_difference(ours, expected)
