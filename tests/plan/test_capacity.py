"""What would exceed host or device memory is refused before anything is allocated, with figures and a remedy."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import PreflightError
from keepstep.plan.capacity import HostMachine, check_device_memory, check_host_memory, state_bytes
from keepstep.plan.cluster import Machine
from keepstep.plan.memory import plan_memory
from keepstep.plan.workload import workload_of

GIB = 2**30
H200 = Machine("NVIDIA H200", int(139.8 * GIB), 989.5e12, "bf16", processes=1, processes_per_node=1)
H200_HOST = HostMachine(processes=1, processes_here=1, gpu=True, available_bytes=128 * GIB)
OFFLOAD_8B = "model=llama-8b model.seq_len=4096 microbatch=1 global_batch=1 parallel.offload=true"


def config(words: str) -> RunConfig:
    return load_config(None, words.split()).config


def test_offloaded_state_of_llama_8b_takes_powers_of_two() -> None:
    work = workload_of(config(OFFLOAD_8B), 1)
    # In MiB: qkv 96, out 64, gate and up 448, down 224; embedding and head 2004 each. Weights and gradients are pinned.
    pinned = 2 * (32 * (128 + 64 + 512 + 256) + 2 * 2048) / 1024
    moments = 8 * 8.03e9 / GIB
    assert state_bytes(work, pinned=True) / GIB == pytest.approx(pinned + moments, rel=0.001)
    assert state_bytes(work, pinned=False) / GIB == pytest.approx(16 * 8.03e9 / GIB, rel=0.001)


def test_offloaded_activations_count_as_host_memory() -> None:
    words = "model=llama-8b model.seq_len=131072 microbatch=1 global_batch=1 lora.rank=16 compute.recompute=full"
    few = replace(H200_HOST, available_bytes=48 * GIB)
    assert list(check_host_memory(config(words), few)) == []
    with pytest.raises(PreflightError) as caught:
        list(check_host_memory(config(f"{words} compute.offload_activations=true"), few))
    error, hint = caught.value.lines()
    # 31 blocks: an input and an attention output of 1 GiB each, and 16 MiB of statistics.
    assert "activations 62.5" in error
    assert "compute.offload_activations=false" in hint


def test_offload_of_llama_8b_is_refused_on_128_gib() -> None:
    with pytest.raises(PreflightError) as caught:
        list(check_host_memory(config(OFFLOAD_8B), H200_HOST))
    error, hint = caught.value.lines()
    assert "has 128.0 GiB of host memory free, and the run needs about 219.6 GiB" in error
    assert "weights, gradients and moments 127.8, a copy for saves 89.7" in error
    assert "parallel.offload=false" in hint
    assert "lora.rank=16" in hint
    assert "2 machines" in hint


@pytest.mark.parametrize(
    "words",
    [
        OFFLOAD_8B.replace("offload=true", "offload=false"),
        OFFLOAD_8B.replace("llama-8b", "llama-1b"),
        f"{OFFLOAD_8B} lora.rank=16",
    ],
)
def test_host_memory_that_suffices_is_not_refused(words: str) -> None:
    assert list(check_host_memory(config(words), H200_HOST)) == []


def test_remedies_for_host_memory_suffice() -> None:
    few = replace(H200_HOST, available_bytes=64 * GIB)
    with pytest.raises(PreflightError) as caught:
        list(check_host_memory(config(OFFLOAD_8B), few))
    assert caught.value.hint is not None
    # Without offload the copy for saves alone is 90 GiB, so that is no remedy here.
    assert "parallel.offload" not in caught.value.hint
    count = int(caught.value.hint.rpartition(", or ")[2].split()[0])
    words = OFFLOAD_8B.replace("global_batch=1", f"global_batch={count}")
    assert list(check_host_memory(config(words), replace(few, processes=count))) == []


def test_host_memory_within_the_error_of_the_estimate_only_warns() -> None:
    needed = 219.6
    near, far = (replace(H200_HOST, available_bytes=int(needed / share * GIB)) for share in (1.02, 1.05))
    (warning,) = check_host_memory(config(OFFLOAD_8B), near)
    assert warning.startswith("warning: this machine has 215.3 GiB")
    with pytest.raises(PreflightError):
        list(check_host_memory(config(OFFLOAD_8B), far))


def test_host_memory_counts_every_process_of_the_machine() -> None:
    words = "model=llama-3b model.seq_len=1024 microbatch=1 global_batch=8 parallel.replicate=8 parallel.offload=true"
    eight = HostMachine(processes=8, processes_here=8, gpu=True, available_bytes=256 * GIB)
    assert list(check_host_memory(config(words.replace("replicate=8", "replicate=1")), eight)) == []
    with pytest.raises(PreflightError):
        list(check_host_memory(config(words), eight))


def test_a_run_on_cpus_needs_host_memory_for_its_state() -> None:
    laptop = HostMachine(processes=1, processes_here=1, gpu=False, available_bytes=24 * GIB)
    words = "microbatch=1 global_batch=8 compute.device=cpu"
    assert list(check_host_memory(config(f"model=mpt-125m {words}"), laptop)) == []
    with pytest.raises(PreflightError, match="needs about"):
        list(check_host_memory(config(f"model=llama-8b {words}"), laptop))


def test_device_memory_is_refused_where_even_full_recomputation_does_not_fit() -> None:
    words = "model=llama-8b model.seq_len=4096 microbatch=1 global_batch=512"
    machine = replace(H200, device="NVIDIA H100", memory_bytes=79 * GIB, processes=8, processes_per_node=8)
    with pytest.raises(PreflightError) as caught:
        list(check_device_memory(config(f"{words} parallel.replicate=8"), machine))
    error, hint = caught.value.lines()
    assert "with compute.recompute=full" in error
    assert "optimizer" in error
    assert "parallel.replicate=" in hint
    overrides = hint.removeprefix(" hint: ").split("; or ")[0]
    fixed = workload_of(config(f"{words} parallel.replicate=8 {overrides}"), 8, "bf16", machine.memory_bytes)
    assert plan_memory(fixed).needed <= machine.memory_bytes


@pytest.mark.parametrize("mode", ["auto", "none", "full"])
def test_device_memory_that_suffices_with_recomputation_is_not_refused(mode: str) -> None:
    words = f"model=llama-1b model.seq_len=131072 microbatch=1 global_batch=1 compute.recompute={mode}"
    warnings = list(check_device_memory(config(words), H200))
    assert len(warnings) == (mode == "none")
    assert all("compute.recompute=auto" in warning for warning in warnings)


def test_device_memory_within_the_error_of_the_estimate_only_warns() -> None:
    words = config("model=llama-8b model.seq_len=4096 microbatch=1 global_batch=1 compute.recompute=full")
    needed = plan_memory(workload_of(words, 1, "bf16", H200.memory_bytes)).needed
    near, far = (replace(H200, memory_bytes=int(needed / share)) for share in (1.02, 1.06))
    assert len(list(check_device_memory(words, near))) == 1
    with pytest.raises(PreflightError):
        list(check_device_memory(words, far))


def test_train_refuses_offload_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("keepstep.launch.local.available_memory_bytes", lambda: 128 * GIB)
    monkeypatch.setattr("keepstep.launch.local.visible_gpus", lambda: 1)
    # CPU time: the machine may be busy with something else.
    started = time.process_time()
    assert main(["train", *OFFLOAD_8B.split(), "data=synthetic", f"runs_dir={tmp_path}"]) == 3
    assert time.process_time() - started < 5
    assert "the run needs about 219.6 GiB here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
