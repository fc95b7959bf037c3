"""MFU is reported only where the peak of the device is known, and slow attention where it is slow."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.train import device
from keepstep.train.device import attention_notice, known_peak_flops


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
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    found = attention_notice(config, torch.device("cuda"))
    assert reason in found
    assert bool(found) == bool(reason)
    assert attention_notice(config, torch.device("cpu")) == ""
