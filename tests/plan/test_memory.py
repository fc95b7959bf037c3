"""The formula says what the code allocates: the real model, split by the real apply, counted on fake tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.config.load import load_config
from keepstep.plan.memory import offloaded_bytes, plan_memory, stage_memory
from keepstep.plan.tensors import stage_parameters
from keepstep.plan.workload import Workload, workload_of
from keepstep.train.dryrun.dryrun import dry_run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200_BYTES = int(139.8 * 2**30)
SMALL = "model.layers=2 model.hidden=512 model.heads=8 model.ffn_hidden=2048 model.vocab=8192 model.seq_len=512"
LLAMA = f"model=llama-1b {SMALL} model.kv_heads=4"
MPT = f"model=mpt-1b {SMALL}"
GEMMA2 = (
    "model.norm=rmsnorm_1p model.norm_placement=both model.activation=geglu_tanh model.qk_norm=true "
    "model.attn_logit_softcapping=50 model.final_logit_softcapping=30"
)
EXPERTS = "model.experts.count=16 model.experts.top_k=4 model.experts.ffn_hidden=512"
SHARED = "model.experts.shared_ffn_hidden=1024 model.experts.first_dense_layers=1"
LATENT = (
    "model.kv_heads=0 model.kv_lora_rank=128 model.q_lora_rank=192 model.head_dim=96 model.qk_rope_head_dim=32 "
    "model.v_head_dim=64"
)
GPT_OSS = "model.attention_sinks=true model.experts.bias=true model.experts.swiglu_limit=7 model.out_bias=true"
CHUNKED = "model.seq_len=8192 model.vocab=512 compute.mlp_chunk_tokens=1024"
OLMO2 = "model.norm_placement=after model.qk_norm=true model.head_qk_norm=false"


def workload(words: str, processes: int) -> Workload:
    return workload_of(load_config(None, words.split()).config, processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (f"{LLAMA} microbatch=8 global_batch=8", 1),
        (f"{MPT} microbatch=8 global_batch=64 compute.recompute=full parallel.replicate=2", 4),
        (f"{LLAMA} microbatch=8 global_batch=32 compute.recompute=selective parallel.tensor=2", 4),
        (f"{LLAMA} microbatch=4 global_batch=16 parallel.pipeline=2 parallel.shard=2", 4),
        (f"{LLAMA} microbatch=4 global_batch=20 reproducible=elastic", 3),
        (f"{LLAMA} microbatch=1 global_batch=5 reproducible=elastic lora.rank=16", 3),
        (f"{LLAMA} microbatch=8 global_batch=16 lora.rank=16", 2),
        (f"{LLAMA} microbatch=8 global_batch=16 lora.rank=16 lora.base=fp8", 1),
        (f"{LLAMA} microbatch=8 global_batch=16 lora.rank=16 lora.base=nf4", 2),
        (f"{LLAMA} microbatch=4 global_batch=16 precision=fp16", 2),
        (f"{LLAMA} model.vocab=128256 microbatch=1 global_batch=8 reproducible=elastic", 2),
        (f"{LLAMA} model.layers=4 microbatch=8 global_batch=8 compute.offload_activations=true", 1),
        (f"{LLAMA} microbatch=8 global_batch=16 compute.recompute=full compute.offload_activations=true", 2),
        (f"{LLAMA} {CHUNKED} microbatch=1 global_batch=2 compute.recompute=full", 2),
        (f"{LLAMA} {CHUNKED} microbatch=1 global_batch=1 precision=fp8", 1),
        (f"{LLAMA} {GEMMA2} microbatch=8 global_batch=8", 1),
        (f"{LLAMA} {OLMO2} microbatch=8 global_batch=16", 2),
        (f"{LLAMA} {EXPERTS} microbatch=8 global_batch=8", 1),
        (f"{LLAMA} {EXPERTS} microbatch=8 global_batch=8 precision=fp8", 1),
        (f"{LLAMA} model.vocab=65536 microbatch=8 global_batch=8 compute.recompute=full precision=fp8", 1),
        (f"{LLAMA} model.vocab=65536 microbatch=8 global_batch=16 compute.loss_chunks=4 precision=fp8", 2),
        (f"{LLAMA} {EXPERTS} microbatch=8 global_batch=16 compute.recompute=selective", 2),
        (f"{LLAMA} {EXPERTS} {SHARED} microbatch=4 global_batch=16", 2),
        (f"{LLAMA} {EXPERTS} microbatch=4 global_batch=20 reproducible=elastic", 3),
        (f"{LLAMA} {EXPERTS} microbatch=8 global_batch=32 parallel.expert=2", 4),
        (f"{LLAMA} {EXPERTS} {SHARED} microbatch=8 global_batch=16 parallel.tensor=2 parallel.expert=2", 4),
        (f"{LLAMA} {EXPERTS} {GPT_OSS} microbatch=4 global_batch=4", 1),
        (f"{LLAMA} {EXPERTS} {SHARED} {LATENT} microbatch=4 global_batch=16", 2),
        (f"{LLAMA} {EXPERTS} {SHARED} {LATENT} microbatch=4 global_batch=8 parallel.tensor=2", 2),
        (f"{LLAMA} {EXPERTS} {SHARED} {LATENT} microbatch=4 global_batch=8 parallel.context=2", 2),
        (f"{LLAMA} {EXPERTS} {GPT_OSS} microbatch=4 global_batch=8 parallel.tensor=2", 2),
        (f"{LLAMA} {OLMO2} microbatch=8 global_batch=16 parallel.tensor=2", 2),
    ],
)
def test_memory_formula_agrees_with_trace(words: str, processes: int) -> None:
    config = load_config(None, [*([] if "precision" in words else ["precision=bf16"]), *words.split()]).config
    traced = dry_run(config, workload_of(config, processes))
    for stage in traced.stages:
        assert abs(stage.memory_error) < 0.05, list(traced.lines())
        assert stage.traffic_error is None or abs(stage.traffic_error) < 0.05, list(traced.lines())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_pipeline_gathers_weights_once_per_step(schedule: str) -> None:
    words = f"{LLAMA} model.layers=8 microbatch=1 global_batch=16 parallel.pipeline=2 parallel.stages=4"
    config = load_config(None, [*words.split(), f"parallel.schedule={schedule}", "precision=bf16"]).config
    for stage in dry_run(config, workload_of(config, 4)).stages:
        assert stage.traced_traffic.all_gather == stage.predicted_traffic.all_gather


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_schedule_memory_agrees_with_trace(schedule: str) -> None:
    words = f"{LLAMA} model.layers=8 microbatch=4 global_batch=16 parallel.pipeline=2 parallel.schedule={schedule}"
    config = load_config(None, [*words.split(), "precision=bf16"]).config
    traced = dry_run(config, workload_of(config, 2))
    for stage in traced.stages:
        assert -0.05 < stage.memory_error < 0.15, list(traced.lines())
        assert stage.traffic_error is not None
        assert abs(stage.traffic_error) < 0.01, list(traced.lines())


@pytest.mark.slow
def test_memory_of_175b_on_512_processes_agrees_with_trace() -> None:
    # Two blocks a stage; benchmarks/plan_dryrun.py plays all 96.
    words = "model=gpt3-175b model.layers=32 microbatch=1 global_batch=64 compute.recompute=full precision=bf16"
    axes = "parallel.tensor=8 parallel.pipeline=16 parallel.shard=4"
    config = load_config(None, f"{words} {axes}".split()).config
    traced = dry_run(config, workload_of(config, 512))
    assert [stage.stage for stage in traced.stages] == [0, 1, 15]
    for stage in traced.stages:
        assert abs(stage.memory_error) < 0.05, list(traced.lines())
        assert stage.traffic_error is not None
        assert abs(stage.traffic_error) < 0.05, list(traced.lines())


def test_memory_of_lora_and_fp8_agrees_with_h200() -> None:
    lora = json.loads((RESULTS / "lora_h200.json").read_text())
    words = f"model={lora['model']} model.seq_len={lora['seq_len']} lora.rank={lora['rank']} precision=bf16"
    work = workload(f"{words} microbatch=2 global_batch=4 compute.recompute=none parallel.keep_gathered=true", 1)
    planned = plan_memory(replace(work, device_bytes=H200_BYTES))
    assert planned.allocated / 2**30 == pytest.approx(lora["memory_gib"], rel=0.05)
    fp8 = json.loads((RESULTS / "h200.json").read_text())["llama1b_fp8"]
    words = f"model={fp8['model']} model.seq_len={fp8['seq_len']} precision=fp8 compute.recompute=none"
    work = workload(f"{words} microbatch={fp8['microbatch']} global_batch={fp8['global_batch']}", 1)
    planned = plan_memory(replace(work, device_bytes=H200_BYTES))
    assert planned.allocated / 2**30 == pytest.approx(fp8["peak_memory_gib"], rel=0.05)


def test_adapters_alone_have_gradients_and_moments() -> None:
    parts = plan_memory(workload(f"{LLAMA} microbatch=1 global_batch=8 lora.rank=8", 8)).parts
    whole = plan_memory(workload(f"{LLAMA} microbatch=1 global_batch=8", 8)).parts
    # A block's linears have 512 → 1024, 512 → 512, 512 → 4096 and 2048 → 512; q, k, v, gate and up each a first factor.
    numbers = 2 * 8 * (3 * 512 + 1024 + 512 + 512 + 2 * 512 + 4096 + 2048 + 512)
    assert parts.optimizer == 2 * 4 * numbers // 8
    assert parts.parameters < whole.parameters
    assert parts.gradients < whole.gradients / 10


def test_quantised_base_fits_70b_on_one_gpu() -> None:
    words = "model=llama-70b model.seq_len=4096 microbatch=1 global_batch=8 compute.recompute=full lora.rank=16"
    plans = {
        base: plan_memory(replace(workload(f"{words} lora.base={base}", 1), device_bytes=H200_BYTES))
        for base in ("bf16", "fp8", "nf4")
    }
    assert plans["bf16"].needed > H200_BYTES > plans["fp8"].needed > plans["nf4"].needed
    # 80 blocks of 8192 × (10240 + 8192 + 3 × 28672) weights; NF4 has half a byte and an fp32 scale for 64 of them.
    matrices = 80 * 8192 * (10240 + 8192 + 3 * 28672)
    for base, each in (("fp8", 1.0), ("nf4", 0.5625)):
        saved = plans["bf16"].parts.parameters - plans[base].parts.parameters
        assert saved == pytest.approx((2 - each) * matrices, rel=1e-3)
    same = workload(f"{words} precision=fp8", 1)
    assert (same.precision, same.lora_base, same.matmul_precision) == ("bf16", "fp8", "fp8")


def test_quantised_weights_are_whole_on_every_process() -> None:
    words = f"{LLAMA} microbatch=1 global_batch=8 lora.rank=8 lora.base=fp8"
    one, eight = (stage_memory(workload(words, count), 0).parts.parameters for count in (1, 8))
    counts = stage_parameters(workload(words, 8), 0)
    assert eight > counts.quantised_total > 0
    assert one > eight


def test_sharding_over_twice_the_processes_halves_the_state() -> None:
    few, many = (plan_memory(workload(f"{LLAMA} microbatch=1 global_batch=64", count)) for count in (8, 16))
    assert many.parts.optimizer == few.parts.optimizer // 2
    assert many.parts.parameters == few.parts.parameters // 2


def test_offloaded_state_is_not_on_the_device() -> None:
    parts = plan_memory(workload(f"{LLAMA} microbatch=1 global_batch=8 parallel.offload=true", 8)).parts
    assert (parts.parameters, parts.optimizer) == (0, 0)
    assert parts.activations > 0


@pytest.mark.parametrize("mode", ["none", "full"])
def test_offloaded_activations_leave_the_device_for_the_host(mode: str) -> None:
    words = f"{LLAMA} model.layers=16 model.seq_len=32768 microbatch=8 global_batch=8 compute.recompute={mode}"
    plain, offloaded = (workload(f"{words} compute.offload_activations={value}", 1) for value in ("false", "true"))
    freed = plan_memory(plain).allocated - plan_memory(offloaded).allocated
    in_host = offloaded_bytes(offloaded)
    # The block that is prefetched is in both.
    assert 0.8 * in_host < freed <= in_host
    assert offloaded_bytes(plain) == 0


def test_recompute_modes_need_less_in_order() -> None:
    words = f"{LLAMA} microbatch=8 global_batch=64"
    none, selective, full = (
        plan_memory(workload(f"{words} compute.recompute={mode}", 8)).allocated
        for mode in ("none", "selective", "full")
    )
    assert none > selective > full


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_chunked_feed_forwards_leave_room_for_long_rows(mode: str) -> None:
    words = f"model=llama-8b model.seq_len=131072 microbatch=1 global_batch=8 compute.recompute={mode}"
    whole, chunked = (workload(f"{words} compute.mlp_chunk_tokens={tokens}", 8) for tokens in (0, 8192))
    # Of one block: five tensors of the inner width, each 131,072 × 14,336 numbers of 2 bytes, less those of a chunk.
    inner = 5 * 2 * (131072 - 8192) * 14336
    freed = plan_memory(whole).allocated - plan_memory(chunked).allocated
    assert freed > 0.85 * inner


def test_parts_add_up_to_what_is_needed() -> None:
    memory = plan_memory(workload(f"{LLAMA} microbatch=2 global_batch=16", 8))
    assert memory.allocated == memory.parts.total == memory.instants[memory.instant]
    assert memory.needed == memory.allocated + memory.slack


def test_later_stages_of_a_pipeline_hold_fewer_micro_batches() -> None:
    from keepstep.plan.memory import in_flight

    work = workload("model=gpt3-175b microbatch=1 global_batch=256 parallel.tensor=8 parallel.pipeline=16", 512)
    assert [in_flight(work, stage) for stage in (0, 1, 15)] == [16, 15, 1]
