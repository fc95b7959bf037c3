"""Overrides under the names of LLM Foundry, for people who bring their commands along (`-y`, `yamlUpdates`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.config.fields import all_fields
from keepstep.config.hints import hint_for
from keepstep.core.errors import UsageError

_SAME: Mapping[str, str] = {
    "autoresume": "checkpoint.autoresume",
    "device_train_microbatch_size": "microbatch",
    "eval_interval": "evaluate.interval",
    "eval_subset_num_batches": "evaluate.batches",
    "global_seed": "seed",
    "global_train_batch_size": "global_batch",
    "load_path": "checkpoint.resume_from",
    "load_weights_only": "checkpoint.skip_optimizer",
    "max_duration": "max_duration",
    "max_seq_len": "model.seq_len",
    "run_name": "name",
    "save_folder": "checkpoint.folder",
    "save_interval": "checkpoint.interval",
    "scheduler.t_warmup": "schedule.warmup",
    "variables.data_local": "data.cache_dir",
    "variables.max_seq_len": "model.seq_len",
    "variables.run_name": "name",
    "variables.tokenizer_name": "data.tokenizer",
}

_VALUES: Mapping[tuple[str, str], str] = {
    ("precision", "amp_bf16"): "precision=bf16",
    ("precision", "amp_fp16"): "precision=fp16",
    ("precision", "fp32"): "precision=fp32",
    ("save_num_checkpoints_to_keep", "-1"): "checkpoint.keep=0",
    ("fsdp_config.sharding_strategy", "FULL_SHARD"): "parallel.keep_gathered=false",
    ("fsdp_config.sharding_strategy", "SHARD_GRAD_OP"): "parallel.keep_gathered=true",
    ("fsdp_config.activation_checkpointing", "true"): "compute.recompute=full",
    ("fsdp_config.activation_checkpointing", "false"): "compute.recompute=none",
}

# Every checkpoint is written in shards and loads at any number of processes.
_NEEDLESS = frozenset({"fsdp_config.state_dict_type"})
_SPLITS = {"train_loader.dataset.split": "train", "eval_loader.dataset.split": "val"}


def translate(updates: Iterable[str]) -> list[str]:
    """`save_folder=/data/checkpoints` as `checkpoint.folder=/data/checkpoints`; our own names pass unchanged."""
    given: dict[str, str] = {}
    for update in updates:
        key, separator, value = update.partition("=")
        if not separator:
            raise UsageError(f"{update!r} is not key=value", "save_interval=500ba")
        given[key] = value
    words = _data_words(given)
    for key, value in given.items():
        if key in _SPLITS or key == "variables.data_remote" or key in _NEEDLESS:
            continue
        words.append(_word(key, value))
    return words


def _data_words(given: Mapping[str, str]) -> list[str]:
    remote = given.get("variables.data_remote")
    if remote is None:
        if any(key in given for key in _SPLITS):
            raise UsageError("a split is given, but variables.data_remote is not", "variables.data_remote=/data/c4")
        return []
    splits = {key: given.get(key, default) for key, default in _SPLITS.items()}
    folder = remote.rstrip("/")
    return [
        f"data.path={folder}/{splits['train_loader.dataset.split']}",
        f"data.valid_path={folder}/{splits['eval_loader.dataset.split']}",
    ]


def _word(key: str, value: str) -> str:
    if (key, value) in _VALUES:
        return _VALUES[key, value]
    if key == "save_num_checkpoints_to_keep":
        return f"checkpoint.keep={value}"
    if key in _SAME:
        return f"{_SAME[key]}={value}"
    if key in all_fields() or key.startswith("variables."):
        return f"{key}={value}"
    raise UsageError(f"unknown key {key} (value {value!r})", hint_for(key))
