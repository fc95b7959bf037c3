"""The published checkpoint sizes and write times come out of our arithmetic, in their units and in ours."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.config.presets import preset_fields
from keepstep.config.schema import ModelConfig
from keepstep.models.lora import apply_lora
from keepstep.models.transformer import Transformer
from keepstep.plan.cluster import find_cluster, read_profiles
from keepstep.plan.goodput import (
    cheapest,
    checkpoint_bytes,
    dataset_bytes,
    known_recoveries,
    save_time,
    save_times,
    smallest_size_tib,
)
from keepstep.plan.plan import Assumptions, make_plan


def model(name: str) -> ModelConfig:
    return ModelConfig(preset=name, **preset_fields(name))


@pytest.mark.parametrize(("name", "gib"), [("mpt-30b", 336), ("mpt-70b", 725)])
def test_checkpoints_of_mpt_are_as_large_as_published(name: str, gib: float) -> None:
    assert checkpoint_bytes(model(name)) / 2**30 == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 3), ("muon", 2)])
def test_a_checkpoint_of_adapters_holds_nothing_else(optimizer: str, numbers: int) -> None:
    words = ["model=llama-8b", "lora.rank=16", f"optimizer={optimizer}", "global_batch=2", "microbatch=1"]
    config = load_config(None, [*words, "parallel.tensor=2"]).config
    with torch.device("meta"):
        trained = Transformer(config.model)
    apply_lora(trained, config.lora)
    adapters = sum(item.numel() for item in trained.parameters() if item.requires_grad)
    cluster = find_cluster("h200:2", read_profiles())
    plan = make_plan(config, cluster, Assumptions(known_recoveries()["keepstep"]))
    assert plan.storage.checkpoint_bytes == 4 * numbers * adapters


@pytest.mark.parametrize(
    ("tier", "size_tib", "gb_s", "published_min", "exact_min"),
    [
        ("amlfs-40", 480, 19.2, 2.04, 2.195),
        ("amlfs-125", 512, 64, 0.61, 0.659),
        ("amlfs-250", 512, 128, 0.31, 0.329),
        ("amlfs-500", 512, 256, 0.15, 0.165),
    ],
)
def test_lustre_table_in_its_own_units_and_in_ours(
    tier: str, size_tib: float, gb_s: float, published_min: float, exact_min: float
) -> None:
    save = save_time(read_profiles().storage[tier], size_tib, 2.3 * 2**40)
    assert save.write_gb_s == pytest.approx(gb_s)
    assert round(save.minutes_mixed_units, 2) == pytest.approx(published_min, abs=0.006)
    assert save.minutes == pytest.approx(exact_min, abs=0.001)


def test_lustre_comes_in_its_own_steps() -> None:
    storage = read_profiles().storage
    sizes = {name: smallest_size_tib(storage[name], 1) for name in storage if name.startswith("amlfs")}
    assert sizes == {"amlfs-40": 48, "amlfs-125": 16, "amlfs-250": 8, "amlfs-500": 4}


def test_the_cheapest_storage_saves_in_time_and_nothing_cheaper_does() -> None:
    tiers = [each for name, each in read_profiles().storage.items() if name.startswith("amlfs")]
    size = 2.3 * 2**40
    best = cheapest(tiers, size, copies=4, within_s=60)
    assert best is not None
    assert best.seconds <= 60
    assert best.size_tib * 2**40 >= 4 * size
    for tier in tiers:
        for steps in range(1, 200):
            other = save_time(tier, steps * tier.step_tib, size)
            if other.seconds <= 60 and other.size_tib * 2**40 >= 4 * size:
                assert other.price_per_month >= best.price_per_month
    assert cheapest(tiers[:0], size, 4, 60) is None
    assert [each.tier for each in save_times(tiers, size, 4)] == [tier.name for tier in tiers]


def test_tokens_take_two_bytes_where_the_vocabulary_fits() -> None:
    assert dataset_bytes(1000, 50368) == 2000
    assert dataset_bytes(1000, 128256) == 4000
