"""Overrides under LLM Foundry's names become ours, or are refused; none is silently dropped."""

from __future__ import annotations

import pytest

from keepstep.cli.main import main
from keepstep.config.fields import all_fields
from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError, UsageError
from keepstep.launch.foundry import not_used, translate

# Every key of LLM Foundry's own YAML files (scripts/train) and of its TrainConfig.
UPSTREAM = """
accumulate_train_batch_on_tokens algorithms algorithms.gradient_clipping.clipping_threshold
algorithms.gradient_clipping.clipping_type autoresume callbacks callbacks.hf_checkpointer.overwrite
callbacks.hf_checkpointer.precision callbacks.hf_checkpointer.save_folder callbacks.hf_checkpointer.save_interval
callbacks.lr_monitor callbacks.memory_monitor callbacks.runtime_estimator callbacks.speed_monitor.window_size
code_paths compile_config console_log_interval cuda_load_lazy dataset.hf_kwargs.data_dir dataset.hf_name
dataset.preprocessing_fn device_eval_batch_size device_train_batch_size device_train_grad_accum
device_train_microbatch_size dist_timeout eval_first eval_gauntlet eval_gauntlet_str eval_interval eval_loader
eval_loader.dataset.allow_pad_trimming eval_loader.dataset.decoder_only_format
eval_loader.dataset.hf_kwargs.data_dir eval_loader.dataset.hf_name eval_loader.dataset.local
eval_loader.dataset.max_seq_len eval_loader.dataset.packing_ratio eval_loader.dataset.preprocessing_fn
eval_loader.dataset.remote eval_loader.dataset.shuffle eval_loader.dataset.shuffle_seed eval_loader.dataset.split
eval_loader.drop_last eval_loader.name eval_loader.num_workers eval_loader.persistent_workers eval_loader.pin_memory
eval_loader.prefetch_factor eval_loader.timeout eval_loaders eval_subset_num_batches expandable_segments
flatten_metadata fsdp_config fsdp_config.activation_checkpointing fsdp_config.activation_checkpointing_reentrant
fsdp_config.activation_cpu_offload fsdp_config.backward_prefetch fsdp_config.limit_all_gathers
fsdp_config.mixed_precision fsdp_config.sharding_strategy fsdp_config.state_dict_type fsdp_config.sync_module_states
fsdp_config.verbose global_seed global_train_batch_size icl_max_seq_len icl_seq_len icl_subset_num_batches icl_tasks
icl_tasks_str load_ignore_keys load_path load_strict_model_weights load_weights_only log_config log_to_console
loggers max_duration max_seq_len max_split_size_mb metadata model.attn_config.attn_impl
model.attn_config.attn_uses_sequence_id model.config_overrides model.config_overrides.attn_config.attn_impl
model.config_overrides.attn_config.attn_uses_sequence_id model.config_overrides.max_position_embeddings
model.config_overrides.max_seq_len model.config_overrides.n_positions model.d_model model.expansion_ratio
model.ffn_config.ffn_type model.ffn_config.memory_optimized_mlp model.ffn_config.mlp_impl
model.ffn_config.moe_lbl_in_fp32 model.ffn_config.moe_loss_weight model.ffn_config.moe_num_experts
model.ffn_config.moe_top_k model.ffn_config.moe_world_size model.ffn_config.uniform_expert_assignment
model.init_device model.loss_fn model.max_seq_len model.n_heads model.n_layers model.name
model.peft_config.lora_alpha model.peft_config.lora_dropout model.peft_config.peft_type model.peft_config.r
model.peft_config.target_modules model.peft_config.task_type model.pretrained model.pretrained_model_name_or_path
model.use_auth_token model.use_flash_attention_2 model.vocab_size n_gpus only_composer_checkpoint only_hf_checkpoint
optimizer.betas optimizer.eps optimizer.lr optimizer.name optimizer.weight_decay precision profiler progress_bar
python_log_level run_name save_filename save_folder save_ignore_keys save_interval save_latest_filename
save_num_checkpoints_to_keep save_overwrite save_weights_only scheduler scheduler.alpha_f scheduler.name
scheduler.t_warmup seed spin_dataloaders tokenizer tokenizer.kwargs.model_max_length
tokenizer.kwargs.trust_remote_code tokenizer.name tp_config train_loader train_loader.dataset.allow_pad_trimming
train_loader.dataset.decoder_only_format train_loader.dataset.eos_token_id train_loader.dataset.hf_kwargs.data_dir
train_loader.dataset.hf_name train_loader.dataset.local train_loader.dataset.max_seq_len
train_loader.dataset.packing_ratio train_loader.dataset.preprocessing_fn train_loader.dataset.remote
train_loader.dataset.shuffle train_loader.dataset.shuffle_seed train_loader.dataset.split
train_loader.dataset.streams.my_data.local train_loader.dataset.streams.my_data.remote
train_loader.dataset.streams.my_data.split train_loader.drop_last train_loader.name train_loader.num_workers
train_loader.persistent_workers train_loader.pin_memory train_loader.prefetch_factor train_loader.timeout
train_subset_num_batches variables.data_local variables.data_remote variables.global_seed variables.icl_max_seq_len
variables.icl_seq_len variables.max_seq_len variables.model_name variables.run_name variables.tokenizer_name
"""


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("save_interval=500ba", "checkpoint.interval=500ba"),
        ("save_folder=/data/c k=p", "checkpoint.folder=/data/c k=p"),
        ("save_num_checkpoints_to_keep=5", "checkpoint.keep=5"),
        ("save_num_checkpoints_to_keep=-1", "checkpoint.keep=0"),
        ("max_duration=100ba", "max_duration=100ba"),
        ("precision=amp_bf16", "precision=bf16"),
        ("fsdp_config.state_dict_type=sharded", "checkpoint.format=sharded"),
        ("fsdp_config.state_dict_type=full", "checkpoint.format=full"),
        ("fsdp_config.activation_checkpointing=False", "compute.recompute=none"),
        ("save_folder=./{run_name}/checkpoints", "checkpoint.folder=./${name}/checkpoints"),
        ("console_log_interval=20ba", "observe.log_interval=20"),
        ("scheduler.name=linear_decay_with_warmup", "schedule.name=linear"),
        ("scheduler.alpha_f=0.2", "schedule.final=0.2"),
        ("optimizer.name=decoupled_adamw", "optimizer.name=adamw"),
        ("algorithms.gradient_clipping.clipping_threshold=0.5", "optimizer.clip=0.5"),
        ("variables.global_seed=5", "seed=5"),
        ("model.peft_config.r=64", "lora.rank=64"),
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
    # Without a remote, the data itself is in the local folder.
    assert translate(["variables.data_local=my-copy-c4", *updates[2:], "variables.data_remote="]) == [
        "data.path=my-copy-c4/train_small",
        "data.valid_path=my-copy-c4/val_small",
    ]


@pytest.mark.parametrize("key", UPSTREAM.split())
def test_a_wrong_value_of_an_upstream_key_is_never_dropped_in_silence(key: str) -> None:
    try:
        words = translate([f"{key}=banana"])
    except UsageError as refused:
        assert key in refused.message or "a split is given" in refused.message
        assert refused.hint not in (None, "keepstep config reference lists every key")
        assert not str(refused.hint).startswith("did you mean")
    else:
        assert len(not_used([f"{key}=banana"])) == (not words)
        assert {word.partition("=")[0] for word in words} <= set(all_fields())


def test_upstream_settings_of_a_small_model_become_ours() -> None:
    upstream = """max_seq_len=1024 model.name=mpt_causal_lm model.init_device=meta model.d_model=768 model.n_heads=12
        model.attn_config.attn_impl=flash train_loader.name=text train_loader.drop_last=true scheduler.t_warmup=100ba
        optimizer.name=decoupled_adamw optimizer.weight_decay=0.0 algorithms.gradient_clipping.clipping_type=norm
        eval_first=false device_eval_batch_size=16 fsdp_config.mixed_precision=PURE fsdp_config.limit_all_gathers=true
        progress_bar=false console_log_interval=1ba callbacks.speed_monitor.window_size=10"""
    updates = upstream.split()
    config = load_config(None, translate(updates)).config
    assert (config.model.seq_len, config.optimizer.weight_decay, str(config.schedule.warmup)) == (1024, 0.0, "100ba")
    assert [sentence.partition("=")[0] for sentence in not_used(updates)] == [
        "model.init_device", "train_loader.drop_last", "device_eval_batch_size", "fsdp_config.limit_all_gathers",
        "progress_bar", "callbacks.speed_monitor.window_size",
    ]  # fmt: skip


def test_a_job_prints_what_is_not_used_and_refuses_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    update, wrong = "--foundry-update=progress_bar=false", "--foundry-update=fsdp_config.state_dict_type=banana"
    assert main(["launch", "node", update, "--", "config", "show", "--changed"]) == 0
    assert "notice: progress_bar=false is not used: every run measures and logs it" in capsys.readouterr().err
    assert main(["launch", "node", wrong, "--", "config", "show"]) == 2
    error = capsys.readouterr().err
    assert "fsdp_config.state_dict_type is 'banana', but it must be sharded or full" in error
    assert "hint: keepstep calls it checkpoint.format" in error


def test_a_decay_that_is_not_multiplied_by_the_learning_rate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"optimizer.weight_decay is '1e-06'") as refused:
        translate(["optimizer.name=decoupled_adamw", "optimizer.weight_decay=1e-06"])
    assert "divided by optimizer.lr" in str(refused.value.hint)


@pytest.mark.parametrize(
    "updates",
    [
        ["save_intervall=5ba"],
        ["save_interval"],
        ["train_loader.dataset.split=train"],
        ["precision=amp_int8x="],
        ["fsdp_config.sharding_strategy=HYBRID_SHARD"],
        ["save_overwrite=true"],
        ["variables.model_name=gpt2"],
    ],
)
def test_what_is_not_understood_is_refused(updates: list[str]) -> None:
    with pytest.raises((UsageError, ConfigError)):
        load_config(None, translate(updates))
