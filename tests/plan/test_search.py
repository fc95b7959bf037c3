"""Search finds all valid layouts fast; the Pareto front is a front; remedies fit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from keepstep.config.load import load_config
from keepstep.plan.cluster import Cluster, find_cluster, read_profiles
from keepstep.plan.memory import plan_memory
from keepstep.plan.search import pareto, pareto_picture, precisions, remedies, search
from keepstep.plan.speed import Factors
from keepstep.plan.workload import Workload, is_valid, workload_of

CLUSTER = find_cluster("azure-nd-h100-v5:16", read_profiles())


def workload(words: str, processes: int) -> Workload:
    return workload_of(load_config(None, words.split()).config, processes)


def fits(work: Workload, cluster: Cluster) -> bool:
    return plan_memory(work).needed <= cluster.gpu.memory_gib * 2**30


@pytest.mark.slow
def test_ten_thousand_layouts_in_under_a_minute(tmp_path: Path) -> None:
    base = workload("model=llama-70b microbatch=1 global_batch=1024", CLUSTER.gpus)
    started = time.process_time()
    found = search(base, CLUSTER, Factors(), ("bf16", "fp8"))
    assert len(found) >= 10_000
    assert time.process_time() - started < 60
    assert all(each.work.degrees.world_size == CLUSTER.gpus and is_valid(each.work) for each in found)
    fitting = [each for each in found if each.fits]
    assert found[: len(fitting)] == sorted(fitting, key=lambda each: each.step_s)
    front = pareto(found)
    for each in front:
        assert not any(other.needed_bytes < each.needed_bytes and other.step_s < each.step_s for other in found)
    picture = tmp_path / "pareto.png"
    pareto_picture(found, CLUSTER, picture, "layouts")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_candidate_words_give_the_same_layout() -> None:
    base = workload("model=llama-8b microbatch=1 global_batch=64", 8)
    cluster = find_cluster("azure-nd-h100-v5:1", read_profiles())
    best = search(base, cluster, Factors(), ("bf16",))[0]
    again = workload(f"model=llama-8b global_batch=64 {' '.join(best.overrides())}", 8)
    assert (again.degrees, again.microbatch, again.recompute) == (
        best.work.degrees,
        best.work.microbatch,
        best.work.recompute,
    )


@pytest.mark.parametrize(
    "words", ["reproducible=elastic", "model.linear=bitnet", "parallel.schedule=zero_bubble compute.compile=false"]
)
@pytest.mark.slow
def test_search_layouts_are_valid_for_training(words: str) -> None:
    run = f"model=llama-1b model.layers=4 microbatch=1 global_batch=16 {words}"
    found = search(workload(run, 4), find_cluster("h100:4", read_profiles()), Factors(), ("bf16",))
    assert found
    for each in found:
        config = load_config(None, [*run.split(), *each.overrides()]).config
        again = workload_of(config, 4)
        assert (again.degrees, plan_memory(again)) == (each.work.degrees, plan_memory(each.work))


def test_search_elastic_runs_are_not_sharded() -> None:
    cluster = find_cluster("h100:6", read_profiles())
    base = workload("model=llama-1b microbatch=1 global_batch=16 reproducible=elastic", 6)
    found = search(base, cluster, Factors(), ("bf16",))
    assert {each.work.degrees for each in found} == {base.degrees}
    assert len({tuple(each.overrides()) for each in found}) == len(found)


def test_remedies_do_not_shard_elastic_runs() -> None:
    cluster = find_cluster("h100:8", read_profiles())
    words = "model=llama-8b microbatch=1 global_batch=8 reproducible=elastic"
    assert not fits(workload(words, 8), cluster)
    for each in remedies(workload(words, 8), cluster, Factors()):
        assert fits(workload(f"{words} {' '.join(each.overrides)}", 8), cluster), each


def test_search_precision_only_where_open() -> None:
    h100, a100 = (find_cluster(name, read_profiles()) for name in ("h100:8", "a100-80:8"))
    work = workload("model=llama-1b", 8)
    assert precisions(work, h100, is_open=True) == ("bf16", "fp8")
    assert precisions(work, h100, is_open=False) == ("bf16",)
    assert precisions(work, a100, is_open=True) == ("bf16",)
    assert precisions(workload("model=llama-1b model.linear=bitnet", 8), h100, is_open=True) == ("bf16",)


def test_remedies_fit_and_change_as_little_as_possible() -> None:
    cluster = find_cluster("azure-nd-h100-v5:1", read_profiles())
    words = "model=llama-8b microbatch=8 global_batch=1024"
    assert not fits(workload(words, 8), cluster)
    found = remedies(workload(words, 8), cluster, Factors())
    assert len(found) == 3
    assert [len(each.overrides) for each in found] == sorted(len(each.overrides) for each in found)
    for each in found:
        assert fits(workload(f"{words} {' '.join(each.overrides)}", 8), cluster), each


def test_a_fixed_shard_degree_is_named_in_the_remedy() -> None:
    cluster = find_cluster("azure-nd-h100-v5:1", read_profiles())
    words = "model=llama-8b microbatch=8 global_batch=1024 parallel.shard=8"
    for each in remedies(workload(words, 8), cluster, Factors(), open_shard=False):
        assert fits(workload(f"{words} {' '.join(each.overrides)}", 8), cluster), each


def test_nothing_is_promised_where_nothing_fits() -> None:
    cluster = find_cluster("a100-40:1", read_profiles())
    assert remedies(workload("model=llama-70b microbatch=1 global_batch=8", 1), cluster, Factors()) == []


def test_offloading_is_a_remedy_for_long_rows() -> None:
    cluster = find_cluster("h100:1", read_profiles())
    work = workload("model=llama-8b model.seq_len=262144 microbatch=1 global_batch=1 lora.rank=16", 1)
    assert not fits(work, cluster)
    assert any("compute.offload_activations=true" in each.overrides for each in remedies(work, cluster, Factors()))


def test_chunked_feed_forwards_are_a_remedy_for_long_rows_only() -> None:
    cluster = find_cluster("azure-nd-h100-v5:1", read_profiles())
    words = "model=llama-8b microbatch=1 global_batch=8 compute.recompute=full"
    for seq_len, offered in ((88064, True), (8192, False)):
        work = workload(f"{words} model.seq_len={seq_len}", 8)
        found = {override for each in remedies(work, cluster, Factors()) for override in each.overrides}
        assert ("compute.mlp_chunk_tokens=8192" in found) == offered
