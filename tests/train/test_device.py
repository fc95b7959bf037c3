"""MFU is reported only where the peak of the device is known, and slow attention where it is slow."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.core.errors import HardwareError
from keepstep.train import device
from keepstep.train.device import known_peak_flops, speed_notice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_peak_flops_of_a_cpu_is_none(dtype: torch.dtype) -> None:
    assert known_peak_flops(torch.device("cpu"), dtype) is None


def test_known_peak_flops_comes_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in (("NVIDIA H200", 989.5e12), ("NVIDIA Unheard-Of 9000", None)):
        monkeypatch.setattr(device, "device_name", lambda _, name=name: name)
        assert known_peak_flops(torch.device("cuda"), torch.bfloat16) == peak
        # A rate measured with one small matmul is no peak: larger ones are faster, and MFU would exceed 100%.
        assert known_peak_flops(torch.device("cuda"), torch.float32) == (peak and 66.9e12)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("model=llama-1b", ""),
        ("model=llama-8b data.separate_documents=true model.sliding_window=512", ""),
        ("model=llama-1b model.head_dim=96", ""),
        ("model=llama-1b model.head_dim=80", "heads of 80 have no kernel"),
        ("model=llama-1b model.seq_len=2000", "model.seq_len is 2000; 2048 would be a multiple of 128"),
        ("model=llama-1b model.attn_logit_softcapping=50", "soft-capped scores"),
        ("model=gpt-oss-20b", "attention sinks"),
        ("model=mpt-125m model.positions=alibi", "ALiBi needs a mask"),
        ("model=deepseek-v2-lite", "latent attention"),
        ("model=llama-1b model.seq_len=2000 precision=fp32", ""),
        ("model=llama-1b model.seq_len=2000 compute.attention=flash", ""),
    ],
)
def test_attention_notice_names_what_is_slow(words: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, words.split()).config
    monkeypatch.setattr(device, "is_hopper", lambda _: True)
    monkeypatch.setattr(device, "missing_for_compile", lambda _: "")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    found = speed_notice(config, torch.device("cuda"))
    assert reason in found
    assert bool(found) == bool(reason)
    assert speed_notice(config, torch.device("cpu")) == ""


def test_fp8_needs_a_gpu_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, full, adapters = torch.device("cuda"), ["model=mpt-tiny", "precision=fp8"], ["lora.rank=4"]
    monkeypatch.setattr(device, "choose_device", lambda *_: gpu)
    monkeypatch.setattr(device, "device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(device, "multiplies_fp8", lambda _: False)
    monkeypatch.setattr(device, "describe_machine", lambda *_: None)
    monkeypatch.setattr(device, "check_device_memory", lambda *_: [])
    with pytest.raises(HardwareError, match="NVIDIA A100 has no fp8 matmuls"):
        device.check_device(load_config(None, full).config)
    # Frozen weights in fp8 are dequantised there.
    device.check_device(load_config(None, full + adapters).config)
    monkeypatch.setattr(device, "multiplies_fp8", lambda _: True)
    device.check_device(load_config(None, full).config)


def test_fp8_on_a_cpu_is_named_as_slow() -> None:
    config = load_config(None, ["model=mpt-tiny", "precision=fp8"]).config
    assert "saves no time on a CPU" in speed_notice(config, torch.device("cpu"))
    assert speed_notice(load_config(None, ["model=mpt-tiny"]).config, torch.device("cpu")) == ""
