"""Step times: near what was published for machines we do not have, and exact after calibration on what we measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.config.layout import Layout
from keepstep.config.load import load_config
from keepstep.core.errors import DataError
from keepstep.models.size import matmul_parameters
from keepstep.plan.calibrate import calibrate, measured_run, read_runs, shipped_runs
from keepstep.plan.cluster import find_cluster, read_profiles
from keepstep.plan.memory import plan_memory
from keepstep.plan.speed import Factors, bubble_share, plan_speed
from keepstep.plan.workload import Workload, workload_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUN = {
    "model": "llama-1b", "seq_len": 4096, "microbatch": 4, "recompute": "none", "precision": "bf16",
    "device": "NVIDIA H200", "step_s": 0.3, "peak_memory_gib": 45.0,
}  # fmt: skip


def workload(words: str, processes: int) -> Workload:
    return workload_of(load_config(None, words.split()).config, processes)


@pytest.mark.parametrize(
    ("words", "cluster", "tokens_per_s_per_gpu"),
    [
        ("model=mpt-7b microbatch=8 global_batch=1024 compute.recompute=full", "azure-nd-h100-v5:1", 10643),
        ("model=mpt-30b microbatch=8 global_batch=2048 compute.recompute=full", "azure-nd-h100-v5:4", 2308),
        ("model=mpt-70b microbatch=4 global_batch=2048 compute.recompute=full", "azure-nd-h100-v5:16", 1058),
    ],
)
def test_speed_uncalibrated_agrees_with_llm_foundry(words: str, cluster: str, tokens_per_s_per_gpu: float) -> None:
    machines = find_cluster(cluster, read_profiles())
    planned = plan_speed(workload(words, machines.gpus), machines)
    assert planned.tokens_per_s_per_gpu == pytest.approx(tokens_per_s_per_gpu, rel=0.2)


def test_calibrate_one_run_fits_itself() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    runs = [measured_run(RUN)]
    planned = plan_speed(runs[0].work, cluster, calibrate(runs, cluster))
    assert planned.step.total_s == pytest.approx(RUN["step_s"], rel=1e-6)


def test_calibrate_profile_separates_matmul_and_attention() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    step = plan_speed(measured_run(RUN).work, cluster).step
    rest = step.total_s - step.matmul_s - step.attention_s
    kernels = {"matmul": 1.2 * step.matmul_s, "attention": 2.0 * step.attention_s}
    total = sum(kernels.values()) + 1.5 * rest
    factors = calibrate([measured_run({**RUN, "step_s": total, "breakdown": kernels})], cluster)
    assert (factors.matmul, factors.attention, factors.memory) == pytest.approx((1.2, 2.0, 1.5), rel=1e-6)


def test_runs_of_another_device_change_nothing() -> None:
    runs = [measured_run({**RUN, "device": "NVIDIA A100-SXM4-40GB"})]
    cluster = find_cluster("h200:1", read_profiles())
    # How fast a host starts kernels is known from the runs that we ship.
    assert calibrate(runs, cluster) == calibrate([], cluster) == Factors(host_s=calibrate([], cluster).host_s)
    gpus = read_profiles().gpus
    assert gpus["a100-40"].is_named("NVIDIA A100-SXM4-40GB")
    assert not gpus["a100-80"].is_named("NVIDIA A100-SXM4-40GB")


def test_a_file_of_runs_is_read_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    for form in (RUN, [RUN, RUN], {"runs": [RUN]}):
        path.write_text(json.dumps(form))
        assert {run.step_s for run in read_runs(path)} == {0.3}
    path.write_text(json.dumps({key: value for key, value in RUN.items() if key != "recompute"}))
    with pytest.raises(DataError, match="lacks recompute"):
        read_runs(path)


def test_measured_run_knows_what_auto_recomputed() -> None:
    assert measured_run({**RUN, "recompute": "auto"}).work.modes == ("none",) * 16
    mixed = ["full"] * 6 + ["none"] * 10
    assert measured_run({**RUN, "recompute": "auto", "recompute_by_block": mixed}).work.modes == tuple(mixed)
    with pytest.raises(DataError, match="recompute 'some', which is none of none, selective, full"):
        measured_run({**RUN, "recompute": "some"})


def test_bench_step_says_what_was_recomputed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny = ["model=mpt-tiny", "model.seq_len=16", "global_batch=2", "compute.device=cpu"]
    assert main(["bench", "step", *tiny, "--steps", "1", "--json"]) == 0
    path = tmp_path / "measured.json"
    path.write_text(capsys.readouterr().out)
    assert json.loads(path.read_text())["recompute"] == "none"
    assert main(["plan", "model=mpt-tiny", "--cluster", "h100:1", "--measured", str(path)]) == 0


def test_adapters_take_the_time_that_an_h200_measured() -> None:
    """Frozen weights have no gradients: a plan that gave them some told of a third more time, and of its price."""
    measured = json.loads((RESULTS / "lora_h200.json").read_text())
    cluster = find_cluster("h200:1", read_profiles())
    words = f"model=llama-8b model.seq_len=4096 lora.rank={measured['rank']} microbatch=2 global_batch=4"
    planned = plan_speed(workload(words, 1), cluster, calibrate(shipped_runs(), cluster))
    assert planned.step.total_s == pytest.approx(measured["step_s"], rel=0.1)
    reported = measured["tokens_per_s"] * planned.flops_per_token / cluster.gpu.flops("bf16")
    assert reported == pytest.approx(measured["mfu"], rel=0.01), "the plan and the run count the same operations"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (("qwen3_8layer",), "model=qwen3-30b-a3b model.layers=8"),
        (("olmoe",), "model=olmoe-1b-7b"),
        (("fp8_steps", "fp8"), "model=olmoe-1b-7b model.layers=8 precision=fp8"),
        (("fp8_steps_mixtral", "bf16"), "model=mixtral-8x7b model.layers=3"),
        (("fp8_steps_mixtral", "fp8"), "model=mixtral-8x7b model.layers=3 precision=fp8"),
    ],
)
def test_experts_take_the_time_and_memory_that_an_h200_measured(name: tuple[str, ...], words: str) -> None:
    measured = reduce(getitem, name, json.loads((RESULTS / "moe.json").read_text()))
    cluster = find_cluster("h200:1", read_profiles())
    rows = f"microbatch={measured['microbatch']} global_batch={measured['global_batch']} compute.recompute=none"
    work = workload(f"{words} model.seq_len={measured['seq_len']} {rows} compute.compile=true", 1)
    planned = plan_speed(work, cluster, calibrate(shipped_runs(), cluster))
    assert planned.step.total_s == pytest.approx(measured["step_s"], rel=0.1)
    assert plan_memory(work).allocated / 2**30 == pytest.approx(measured["peak_memory_gib"], rel=0.05)


def test_speed_frozen_weights_need_no_reduction() -> None:
    cluster = find_cluster("azure-nd-h100-v5:4", read_profiles())
    words = "model=llama-8b microbatch=1 global_batch=32 parallel.replicate=4 parallel.shard=8"
    whole, adapted = (plan_speed(workload(words + more, 32), cluster) for more in ("", " lora.rank=16"))
    assert adapted.traffic_s["replicate"] < whole.traffic_s["replicate"] / 100
    assert adapted.traffic_s["shard"] < whole.traffic_s["shard"]
    assert adapted.step.update_s < whole.step.update_s / 100


def test_bubble_shrinks_with_better_schedules() -> None:
    work = replace(workload("model=llama-8b global_batch=64 microbatch=1", 1), degrees=Layout(pipeline=4))
    plain = bubble_share(work)
    assert plain == 3
    assert bubble_share(replace(work, schedule="interleaved", stages_per_process=2)) == plain / 2
    assert bubble_share(replace(work, schedule="zero_bubble")) == plain / 3


def test_a_slower_network_is_waited_for() -> None:
    cluster = find_cluster("azure-nd-h100-v5:16", read_profiles())
    work = workload("model=llama-70b microbatch=1 global_batch=1024 compute.recompute=full", cluster.gpus)
    fast, slow = plan_speed(work, cluster), plan_speed(work, replace(cluster, network_gb_s=1))
    assert slow.step.exposed_s["shard"] > 10 * fast.step.exposed_s["shard"]
    assert slow.mfu < fast.mfu


def measured_runs() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    truth, steps = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("plan_truth", "h200"))
    return truth["calibration"], [*truth["runs"], steps["llama1b_bf16"], steps["mpt1b"], steps["llama1b_fp8"]]


def test_calibrate_one_run_predicts_others_within_10_percent() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    calibration, runs = measured_runs()
    factors = calibrate([measured_run(calibration)], cluster)
    assert len(runs) == 15
    for run in runs:
        measured = measured_run(run)
        assert cluster.gpu.is_named(measured.device)
        assert plan_speed(measured.work, cluster, factors).step.total_s == pytest.approx(measured.step_s, rel=0.1)
        assert plan_memory(measured.work).allocated / 2**30 == pytest.approx(run["peak_memory_gib"], rel=0.05)


def short_kernels(steps: int, **more: Any) -> dict[str, Any]:
    """A small model in many micro batches, whose kernels take half of a step."""
    kernels = {"matmul": 0.2, "attention": 0.1, "other": 0.1}
    run = {**RUN, "model": "smollm-135m", "seq_len": 2048, "microbatch": 8, "global_batch": 8 * steps, "step_s": 0.8}
    return {**run, "breakdown": kernels, **more}


def test_waits_for_the_host_are_told_from_kernels() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    kernels = calibrate([measured_run(RUN)], cluster)
    both = calibrate([measured_run(RUN), measured_run(short_kernels(8))], cluster)
    assert both.host_s == pytest.approx(0.8 / 8 / 30)
    assert replace(both, host_s=0) == replace(kernels, host_s=0)
    # A device's own runs count before those that we ship.
    assert kernels.host_s not in (0, both.host_s)


def test_a_step_is_no_shorter_than_the_start_of_its_kernels() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    factors = Factors(host_s=0.003)
    words = "model=smollm-135m global_batch=64 compute.compile=false"
    steps = {rows: plan_speed(workload(f"{words} microbatch={rows}", 1), cluster, factors).step for rows in (4, 8, 64)}
    assert steps[4].total_s == pytest.approx(2 * steps[8].total_s, rel=0.05)
    assert steps[8].total_s == pytest.approx(8 * 30 * 0.003, rel=0.05)
    assert steps[64].launch_s == 0
    assert steps[8].total_s - steps[8].launch_s == pytest.approx(steps[64].total_s, rel=0.02)


def test_shipped_runs_are_planned_within_10_percent() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    runs = shipped_runs()
    assert any(run.waits_for_host for run in runs)
    # Small models with the default settings.
    assert any(run.work.compiled and run.work.model.hidden < 1024 for run in runs)
    for run in runs:
        planned = plan_speed(run.work, cluster, calibrate(runs, cluster)).step
        assert planned.total_s == pytest.approx(run.step_s, rel=0.1)


def test_speed_memory_traffic_agrees_with_measurement() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    calibration, runs = measured_runs()
    for run in [calibration, *runs]:
        planned = plan_speed(measured_run(run).work, cluster).step
        assert planned.memory_s == pytest.approx(run["breakdown"]["other"] + run["breakdown"]["copies"], rel=0.2), run
        assert planned.update_s == pytest.approx(run["breakdown"]["optimizer"], rel=0.15), run


@pytest.mark.parametrize("model", ["mpt-1b", "llama-1b"])
def test_speed_fused_epilogues_cost_nothing_extra(model: str) -> None:
    words = f"model={model} precision=bf16 microbatch=4 global_batch=4"
    inside, apart = (workload(words + more, 1) for more in ("", " compute.fused_matmuls=false"))
    hopper, older = (find_cluster(name, read_profiles()) for name in ("h200:1", "a100-80:1"))
    assert plan_speed(inside, hopper).step.memory_s < 0.9 * plan_speed(apart, hopper).step.memory_s
    # Of it all, sums before norms alone need no Hopper GPU, and only where products have no bias.
    shares = [plan_speed(work, older).step.memory_s for work in (inside, apart)]
    assert (shares[0] == shares[1]) == inside.model.bias


def test_speed_full_recompute_skips_last_matmul() -> None:
    cluster = find_cluster("h200:1", read_profiles())
    words = "model=llama-1b precision=bf16 microbatch=4 global_batch=4 compute.recompute="
    none, full = (plan_speed(workload(words + mode, 1), cluster).step.matmul_s for mode in ("none", "full"))
    model = workload(words + "full", 1).model
    whole = 2 * (matmul_parameters(model) - model.padded_vocab * model.hidden)
    last = 2 * model.layers * model.ffn_size * model.hidden
    per_flop = none / (6 * matmul_parameters(model))
    assert full - none == pytest.approx((whole - last) * per_flop)


@pytest.mark.parametrize(("mode", "passes"), [("none", 3), ("full", 1)])
def test_chunks_compute_the_feed_forward_once_more(mode: str, passes: int) -> None:
    cluster = find_cluster("h100:1", read_profiles())
    work = workload(f"model=llama-1b microbatch=1 global_batch=1 model.seq_len=65536 compute.recompute={mode}", 1)
    whole, *chunked = (plan_speed(replace(work, mlp_chunk_tokens=tokens), cluster).step for tokens in (0, 8192, 1024))
    model = work.model
    # Full recomputation leaves out only the last of three matmuls.
    repeated = 2 * passes * model.layers * model.ffn_size * model.hidden
    per_flop = whole.matmul_s / (6 * matmul_parameters(model)) if mode == "none" else None
    for each in chunked:
        assert each.matmul_s > whole.matmul_s
        assert per_flop is None or each.matmul_s - whole.matmul_s == pytest.approx(repeated * per_flop)
    # Smaller chunks add to the sums of gradients more often.
    assert chunked[1].memory_s > chunked[0].memory_s > whole.memory_s


def test_offloading_costs_only_what_computing_does_not_hide() -> None:
    cluster = find_cluster("h100:1", read_profiles())
    words = "model=llama-8b microbatch=1 global_batch=4 lora.rank=16"
    exposed = {}
    for seq_len, mode in ((2048, "none"), (131072, "none"), (2048, "full"), (131072, "full")):
        work = workload(f"{words} model.seq_len={seq_len} compute.recompute={mode}", 1)
        plain, moved = plan_speed(work, cluster), plan_speed(replace(work, offload_activations=True), cluster)
        exposed[seq_len, mode] = moved.step.exposed_s["host"]
        assert moved.step.total_s == pytest.approx(plain.step.total_s + exposed[seq_len, mode])
        assert moved.traffic_s["host"] > 0
    # Short rows with everything saved are bound by the link; in long rows attention hides it.
    assert exposed[2048, "none"] > 0
    assert exposed[131072, "none"] == exposed[131072, "full"] == 0
