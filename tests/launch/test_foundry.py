"""Overrides under LLM Foundry's names become ours, or are refused; none is silently dropped."""

from __future__ import annotations

import pytest

from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError, UsageError
from keepstep.launch.foundry import translate


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("save_interval=500ba", "checkpoint.interval=500ba"),
        ("save_folder=/data/c k=p", "checkpoint.folder=/data/c k=p"),
        ("save_num_checkpoints_to_keep=5", "checkpoint.keep=5"),
        ("save_num_checkpoints_to_keep=-1", "checkpoint.keep=0"),
        ("max_duration=100ba", "max_duration=100ba"),
        ("precision=amp_bf16", "precision=bf16"),
        ("fsdp_config.sharding_strategy=SHARD_GRAD_OP", "parallel.keep_gathered=true"),
        ("fsdp_config.activation_checkpointing=true", "compute.recompute=full"),
        ("global_train_batch_size=512", "global_batch=512"),
        ("optimizer.lr=1e-4", "optimizer.lr=1e-4"),
        ("variables.mine=3", "variables.mine=3"),
    ],
)
def test_a_known_name_becomes_ours_and_loads(given: str, ours: str) -> None:
    assert translate([given]) == [ours]
    load_config(None, translate([given]))


def test_remote_data_and_splits_become_two_paths() -> None:
    assert translate(["variables.data_remote=/data/c4/"]) == [
        "data.path=/data/c4/train",
        "data.valid_path=/data/c4/val",
    ]
    updates = [
        "variables.data_remote=/data/c4", "variables.data_local=/tmp/c4",
        "train_loader.dataset.split=train_small", "eval_loader.dataset.split=val_small",
    ]  # fmt: skip
    assert translate(updates) == [
        "data.path=/data/c4/train_small",
        "data.valid_path=/data/c4/val_small",
        "data.cache_dir=/tmp/c4",
    ]


@pytest.mark.parametrize(
    "updates",
    [["save_intervall=5ba"], ["save_interval"], ["train_loader.dataset.split=train"], ["precision=amp_int8x="]],
)
def test_what_is_not_understood_is_refused(updates: list[str]) -> None:
    with pytest.raises((UsageError, ConfigError)):
        load_config(None, translate(updates))
