"""Orthogonalise matrices: replace their singular values by values near one (Newton–Schulz).

A round is x ← p(g) · x with the Gram matrix g = x · xᵀ and p(g) = a + b·g + c·g². Both g and p(g) are symmetric, so on
a GPU only one half of them is computed. For a matrix that is much longer than wide, most work is in g and in p(g) · x.
There several rounds run on the small matrices: after x ← p · x the Gram matrix is p · g · p. After at most three rounds
g is computed from x again: in bf16 five in a row make the small singular values of some matrices explode.

Shape legend: n matrices, s their short side, l their long side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.models.ops.backend import backend

A, B, C = 3.4445, -4.7750, 2.0315
"""Quintic iteration that is steep at zero: five rounds bring singular values near one."""
_ROUNDS = (1, 1, 1, 1, 1)
_LONG_ROUNDS = (3, 2)
"""Rounds between two Gram matrices."""
_LONG = 2
"""Long sides of so many short ones: from here on rounds on small matrices are less work."""
_SYMMETRIC_FROM = 512
"""Short sides from which half a matmul of our own is faster than a whole one of the library's."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """A matrix, or each in a stack of any depth, with singular values near one; in the matrix's own precision."""
    if not matrix.numel():
        return matrix
    x = matrix.flatten(0, -3) if matrix.ndim > 3 else matrix.view(-1, *matrix.shape[-2:])
    x = x.bfloat16() if x.is_cuda else x.float()
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / (norms + 1e-7).to(x.dtype)
    long, short = max(x.shape[1:]), min(x.shape[1:])
    for rounds in _LONG_ROUNDS if long >= _LONG * short else _ROUNDS:
        x = _several_rounds(x, rounds)
    return x.to(matrix.dtype).view(matrix.shape)


def _several_rounds(x: Tensor, rounds: int) -> Tensor:
    tall = x.size(-2) > x.size(-1)
    side = x.mT if tall else x
    gram = symmetric(side, side)
    whole = polynomial = _polynomial(gram)
    for _ in range(rounds - 1):
        # They are polynomials of one matrix, so they commute and all their products are symmetric.
        gram = symmetric(polynomial, symmetric(polynomial, gram))
        polynomial = _polynomial(gram)
        whole = symmetric(polynomial, whole)
    return _matmul(x, whole) if tall else _matmul(whole, x)


def _polynomial(gram_nss: Tensor) -> Tensor:
    return symmetric(gram_nss, gram_nss, gram_nss, C, B, A)


def symmetric(
    left_nsk: Tensor,
    right_nsk: Tensor,
    added_nss: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """alpha · left · rightᵀ + beta · added + diagonal · identity, where the result is symmetric."""
    size, depth = left_nsk.shape[1:]
    if left_nsk.is_cuda and size >= _SYMMETRIC_FROM and backend().has_muon(left_nsk):
        from keepstep.models.kernels.muon import fits_tiles, symmetric_matmul

        same_steps = left_nsk.stride(0) == right_nsk.stride(0)
        if same_steps and fits_tiles(size, depth):
            return symmetric_matmul(left_nsk, right_nsk, added_nss, alpha, beta, diagonal)
    out_nss = _matmul(left_nsk, right_nsk.mT)
    if alpha != 1.0:
        out_nss.mul_(alpha)
    if added_nss is not None:
        out_nss.add_(added_nss, alpha=beta)
    if diagonal:
        out_nss.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out_nss


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Each matrix times its partner."""
    if left.is_cuda:
        return torch.bmm(left, right)
    # A CPU library sums in an order that depends on the size of the batch.
    return torch.stack([torch.mm(*pair) for pair in zip(left, right, strict=True)])
