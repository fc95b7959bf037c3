"""MFU is reported only where the peak of the device is known."""

from __future__ import annotations

import pytest
import torch

from keepstep.train import device
from keepstep.train.device import known_peak_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_peak_flops_of_a_cpu_is_none(dtype: torch.dtype) -> None:
    assert known_peak_flops(torch.device("cpu"), dtype) is None


def test_known_peak_flops_comes_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in (("NVIDIA H200", 989.5e12), ("NVIDIA Unheard-Of 9000", None)):
        monkeypatch.setattr(device, "device_name", lambda _, name=name: name)
        assert known_peak_flops(torch.device("cuda"), torch.bfloat16) == peak
        # A rate measured with one small matmul is no peak: larger ones are faster, and MFU would exceed 100%.
        assert known_peak_flops(torch.device("cuda"), torch.float32) == (peak and 66.9e12)
