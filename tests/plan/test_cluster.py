"""Clusters are data: ours and the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.core.errors import ConfigError, UsageError
from keepstep.plan.cluster import find_cluster, read_profiles

MINE = """
gpus:
  mi300x: {memory_gib: 191.5, tflops: {bf16: 1307, fp32: 163}, memory_gb_s: 5300}
clusters:
  cellar: {gpu: mi300x, gpus_per_node: 4, link_gb_s: 64, network_gb_s: 12, storage: [amlfs-125]}
"""


def test_machines_are_counted_by_cluster_and_gpus_by_bare_name() -> None:
    profiles = read_profiles()
    assert find_cluster("azure-nd-h100-v5:16", profiles).gpus == 128
    assert find_cluster("h200:4", profiles).gpus == 4
    assert find_cluster("h200", profiles).gpus == 1


@pytest.mark.parametrize("gpu", ["a100-40", "a100-80", "h100", "h200", "b200"])
def test_known_gpus_ship(gpu: str) -> None:
    assert read_profiles().gpus[gpu].flops("bf16") >= 312e12


def test_a_users_file_adds_to_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    cluster = find_cluster("cellar:2", read_profiles(path))
    assert (cluster.gpus, cluster.gpu.name, cluster.storage[0].name) == (8, "mi300x", "amlfs-125")
    assert "azure-nd-h100-v5" in read_profiles(path).clusters


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gpus: {x: {memory_gib: 80, tflops: {bf16: 1}, memory_gbs: 1}}", "unknown key memory_gbs", "memory_gb_s"),
        ("gpus: {x: {memory_gib: 80}}", "lacks tflops", "memory_gb_s"),
        ("clusters: {x: {gpu: nothing}}", "nothing", "h100"),
        ("gpus: {x: {memory_gib: -1, tflops: {bf16: 1}, memory_gb_s: 1}}", "must be 0 or more", ""),
        ("machines: {}", "unknown key machines", "gpus"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_profiles(path)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        find_cluster("azure-nd-h10-v5:2", read_profiles())
    assert caught.value.hint == "did you mean azure-nd-h100-v5?"
    with pytest.raises(UsageError):
        find_cluster("h100:many", read_profiles())


@pytest.mark.parametrize(
    "name", ["rtx-3090", "rtx-4090", "rtx-5090", "aws-p5", "aws-p5en", "gcp-a3-ultra", "gcp-a4", "nebius-h200"]
)
def test_consumer_gpus_and_clouds_are_known(name: str) -> None:
    cluster = find_cluster(f"{name}:1", read_profiles())
    assert cluster.gpu.flops("bf16") > 0
    assert cluster.gpu.memory_gib > 10


def test_an_unknown_price_is_null_and_plans_no_cost(tmp_path: Path) -> None:
    assert find_cluster("aws-p5:2", read_profiles()).price_per_node_hour == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text("clusters: {aws-p5: {gpu: h100, price_per_node_hour: 31.5}}")
    assert find_cluster("aws-p5:2", read_profiles(mine)).price_per_node_hour == 31.5


def test_a_geforce_is_found_by_its_whole_name() -> None:
    gpu = read_profiles().gpus["rtx-4090"]
    assert gpu.is_named("NVIDIA GeForce RTX 4090")
    assert not gpu.is_named("NVIDIA GeForce RTX 4090 Laptop GPU")


@pytest.mark.parametrize("name", [name for name in read_profiles().gpus if name.startswith(("rtx-", "apple-"))])
def test_plan_answers_for_consumer_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=mpt-125m", "--cluster", f"{name}:1"]) == 0
    text = capsys.readouterr().out
    assert "verdict: fits" in text
    assert ("trains on the CPU of a Mac" in text) == name.startswith("apple-")


def test_gpu_of_this_machine_is_found_among_similar_names() -> None:
    gpus = read_profiles().gpus.values()
    for device, name in (("NVIDIA GeForce RTX 4070", "rtx-4070"), ("NVIDIA GeForce RTX 4070 Ti", "rtx-4070-ti")):
        assert [gpu.name for gpu in gpus if gpu.is_named(device)] == [name]


# CUDA cores and boost clock in GHz, as NVIDIA lists them.
GEFORCE = {
    "rtx-3060": (3584, 1.777), "rtx-3070": (5888, 1.725), "rtx-3080": (8704, 1.71), "rtx-3090": (10496, 1.695),
    "rtx-4060": (3072, 2.46), "rtx-4060-ti": (4352, 2.535), "rtx-4070": (5888, 2.475), "rtx-4070-ti": (7680, 2.61),
    "rtx-4080": (9728, 2.505), "rtx-4090": (16384, 2.52), "rtx-5070": (6144, 2.512), "rtx-5070-ti": (8960, 2.452),
    "rtx-5080": (10752, 2.617), "rtx-5090": (21760, 2.407),
}  # fmt: skip


def test_geforce_rates_follow_from_cores_and_clock() -> None:
    gpus = {name: gpu for name, gpu in read_profiles().gpus.items() if name.startswith("rtx-")}
    assert gpus.keys() == GEFORCE.keys()
    for name, (cores, clock_ghz) in GEFORCE.items():
        tflops = gpus[name].tflops
        # A multiplication and an addition a core and cycle; tensor cores do twice that, with fp32 sums.
        assert tflops["fp32"] == pytest.approx(2 * cores * clock_ghz / 1000, abs=0.06), name
        assert tflops["bf16"] == tflops["fp16"] == pytest.approx(4 * cores * clock_ghz / 1000, abs=0.06), name
        assert tflops.get("fp8", 2 * tflops["bf16"]) == pytest.approx(2 * tflops["bf16"], rel=0.001), name
