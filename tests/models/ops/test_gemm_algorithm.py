"""Which kernel computes a large product: what decides, and what is kept of it. The GPU's part is made up here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.models.kernels import cublaslt
from keepstep.models.kernels.cublaslt import CublasError, kernel_of

KERNELS = [kernel_of([number] * 8) for number in range(4)]


class MadeUp:
    """Kernels that take as long as they say, and one that gives other bits."""

    def __init__(self, seconds: list[float], torch_s: float | None, other_bits: int | None = None) -> None:
        self.seconds, self.torch_s, self.other_bits = seconds, torch_s, other_bits
        self.out = torch.zeros(3, 2)
        self.measured = 0

    def kernels(self) -> list[Any]:
        self.measured += 1
        return KERNELS[: len(self.seconds)]

    def run(self, _: Any, kernel: Any) -> None:
        number = kernel[0]
        if number >= len(self.seconds):
            raise CublasError("no such kernel")
        self.out.fill_(1.0)
        if number == self.other_bits:
            # The last bit of two numbers, up and down.
            self.out[1, :] = torch.tensor([1 + 2**-23, 1 - 2**-24])
        self.took_s = self.seconds[number]

    def by_torch(self) -> None:
        assert self.torch_s is not None
        self.out.fill_(1.0)
        self.took_s = self.torch_s

    def time_s(self, way: Callable[[], None], _calls: int) -> float:
        way()
        return self.took_s

    def fastest(self) -> int | None:
        by_torch = None if self.torch_s is None else self.by_torch
        found = cublaslt.fastest_kernel(("a product",), lambda: self, self.run, self.out, by_torch)  # type: ignore[type-var]
        return None if found is None else found[1][0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., MadeUp]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made up")
    monkeypatch.setattr(cublaslt, "version", lambda: 1)
    monkeypatch.setattr(cublaslt, "cache_folder", lambda: tmp_path)

    def make(*args: Any) -> MadeUp:
        product = MadeUp(*args)
        monkeypatch.setattr(cublaslt, "_time_s", product.time_s)
        return product

    return make


def test_the_fastest_wins_where_it_is_worth_it(gpu: Callable[..., MadeUp], tmp_path: Path) -> None:
    for seconds, torch_s, expected in (
        ([3.0, 2.0, 2.5], 2.9, 1),
        ([3.0, 2.0, 2.5], 2.01, None),
        ([3.0, 2.0, 2.5], None, 1),
        ([], 2.0, None),
        ([], None, None),
    ):
        assert gpu(seconds, torch_s).fastest() == expected
        for kept in tmp_path.glob("choices/*"):
            kept.unlink()


def test_a_kernel_with_other_bits_is_never_chosen(gpu: Callable[..., MadeUp]) -> None:
    assert gpu([3.0, 1.0, 2.0], 2.9, 1).fastest() == 2


def test_a_choice_is_made_once_a_machine(gpu: Callable[..., MadeUp], tmp_path: Path) -> None:
    assert gpu([3.0, 2.0], 2.9).fastest() == 1
    again = gpu([1.0, 2.0], 2.9)
    assert again.fastest() == 1
    assert again.measured == 0
    (kept,) = tmp_path.glob("choices/*")
    # A kernel that this library does not have, half a file, something else, and nothing.
    for damaged in ("[3, 3, 3, 3, 3, 3, 3, 3]", '[3, "a', "[1, 2]", ""):
        kept.write_text(damaged)
        after = gpu([1.0, 2.0], 2.9)
        assert after.fastest() == 0
        assert after.measured == 1


def test_torchs_own_way_is_remembered_too(gpu: Callable[..., MadeUp]) -> None:
    assert gpu([3.0], 2.0).fastest() is None
    again = gpu([1.0], 2.0)
    assert again.fastest() is None
    assert again.measured == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_compared_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name().startswith("aten::sum"):
                added.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(cublaslt, "_SUMMED", 64)
    out = torch.randn(33, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    with Watch():
        bits = cublaslt._bits(out)
    assert max(added) <= 64
    numbers = out.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).long()
    assert torch.equal(bits, torch.cat([numbers.sum(0), numbers.sum(1)]))
    other = out.clone()
    other[32, 19] = -other[32, 19]
    assert not torch.equal(cublaslt._bits(other), bits)
