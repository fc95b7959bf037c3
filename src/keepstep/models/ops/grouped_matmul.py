"""One matmul for each group of rows: torch's grouped kernel where it has one, else a loop over the groups.

Shape legend: m rows, sorted by group; g groups; k inputs; n outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_ALIGNED_BYTES = 16
"""The grouped kernel wants rows that are a multiple of this long."""


def grouped_matmul(x_mk: Tensor, weight_gnk: Tensor, ends_g: Tensor, *, has_kernel: bool) -> Tensor:
    """x · wᵀ with the weights of each row's group, [m, n]; group i ends before row `ends_g[i]` (int32)."""
    return grouped_matmul_transposed(x_mk, weight_gnk.transpose(1, 2), ends_g, has_kernel=has_kernel)


def grouped_matmul_transposed(x_mn: Tensor, weight_gnk: Tensor, ends_g: Tensor, *, has_kernel: bool) -> Tensor:
    """x · w with the weights of each row's group, [m, k]."""
    if has_kernel and _is_aligned(x_mn, *weight_gnk.shape[1:]):
        product: Tensor = torch._grouped_mm(x_mn, weight_gnk, offs=ends_g)
        return product
    return loop_matmul(x_mn, weight_gnk.transpose(1, 2), ends_g)


def grouped_outer(left_mn: Tensor, right_mk: Tensor, ends_g: Tensor, *, has_kernel: bool) -> Tensor:
    """leftᵀ · right over the rows of each group, [g, n, k]: the gradient of `weight_gnk`."""
    if has_kernel and _is_aligned(left_mn, left_mn.shape[1], right_mk.shape[1]):
        product: Tensor = torch._grouped_mm(left_mn.t(), right_mk, offs=ends_g)
        return product
    parts = zip(_split(left_mn, ends_g), _split(right_mk, ends_g), strict=True)
    return torch.stack([left.t() @ right for left, right in parts])


def loop_matmul(x_mk: Tensor, weight_gnk: Tensor, ends_g: Tensor) -> Tensor:
    """x · wᵀ, one group after the other: the reference. The host waits for the sizes of the groups."""
    rows = _split(x_mk, ends_g)
    return torch.cat([part @ weight_nk.t() for part, weight_nk in zip(rows, weight_gnk.unbind(), strict=True)])


def _split(x_mk: Tensor, ends_g: Tensor) -> tuple[Tensor, ...]:
    ends = ends_g.tolist()
    parts: tuple[Tensor, ...] = x_mk.split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return parts


def _is_aligned(like: Tensor, *sizes: int) -> bool:
    return all(size * like.element_size() % _ALIGNED_BYTES == 0 for size in sizes)


@functools.cache
def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped kernel gives the loop's result on this device, gradients included; tried once."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    # A thread of its own: the first use may be inside a block that records what it recomputes, and would record this.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_grouped_kernel_agrees, device, dtype).result()


def _grouped_kernel_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((24, 16), (3, 32, 16)))
    # An empty group too: an expert may get no token.
    ends = torch.tensor([7, 7, 24], dtype=torch.int32, device=device)
    try:
        tried = _with_gradients(lambda a, b: torch._grouped_mm(a, b.transpose(1, 2), offs=ends), x, weight)
    except (RuntimeError, NotImplementedError):
        return False
    expected = _with_gradients(lambda a, b: loop_matmul(a, b, ends), x, weight)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    pairs = zip(tried, expected, strict=True)
    return all(bool((one - other).abs().max() <= tolerance * other.abs().max()) for one, other in pairs)


def _with_gradients(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = product(x, weight)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))
