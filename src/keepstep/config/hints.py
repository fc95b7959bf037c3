"""What the user most likely meant by a key we do not know: a typing slip, the wrong section, or another tool's name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from keepstep.config.fields import all_fields, all_sections
from keepstep.config.values import listed, nearest

# Below this two names share letters but no meaning.
_ALIKE = 0.65

_SHARDING = "sharding is set by parallel.shard, parallel.replicate and parallel.keep_gathered"

# Names people bring along from llm-foundry, Composer, Megatron, torchtitan and the Hugging Face Trainer.
# A text with a space is a whole sentence; all else is the key to use.
ELSEWHERE: Mapping[str, str] = {
    "activation_checkpointing": "compute.recompute",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_eps": "optimizer.eps",
    "autoresume": "checkpoint.autoresume",
    "batch_size": "global_batch",
    "clip_grad": "optimizer.clip",
    "d_model": "model.hidden",
    "data_parallel_replicate_degree": "parallel.replicate",
    "data_parallel_shard_degree": "parallel.shard",
    "device_eval_batch_size": "validation uses microbatch rows at a time; leave it out",
    "device_train_microbatch_size": "microbatch",
    "eval_first": "evaluate.interval",
    "eval_interval": "evaluate.interval",
    "eval_iters": "evaluate.batches",
    "eval_steps": "evaluate.interval",
    "eval_subset_num_batches": "evaluate.batches",
    "exit_duration": "max_duration",
    "expansion_ratio": "model.ffn_hidden",
    "ffn_hidden_size": "model.ffn_hidden",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "global_batch_size": "global_batch",
    "global_seed": "seed",
    "global_train_batch_size": "global_batch",
    "gradient_accumulation_steps": "accumulation follows from global_batch, microbatch and the number of processes",
    "gradient_checkpointing": "compute.recompute",
    "gradient_clip": "optimizer.clip",
    "gradient_clipping": "optimizer.clip",
    "hidden_size": "model.hidden",
    "initial_lr": "optimizer.lr",
    "intermediate_size": "model.ffn_hidden",
    "learning_rate": "optimizer.lr",
    "load_path": "checkpoint.resume_from",
    "load_weights_only": "checkpoint.skip_optimizer",
    "local_batch_size": "microbatch",
    "log_every": "observe.log_interval",
    "log_interval": "observe.log_interval",
    "logging_steps": "observe.log_interval",
    "lr_decay_style": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "max_grad_norm": "optimizer.clip",
    "max_norm": "optimizer.clip",
    "max_seq_len": "model.seq_len",
    "max_steps": "max_duration",
    "micro_batch_size": "microbatch",
    "min_lr": "schedule.final",
    "mixed_precision": "precision",
    "n_embd": "model.hidden",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_hidden_layers": "model.layers",
    "num_key_value_heads": "model.kv_heads",
    "num_layers": "model.layers",
    "num_query_groups": "model.kv_heads",
    "num_train_epochs": "max_duration",
    "per_device_train_batch_size": "microbatch",
    "recompute_granularity": "compute.recompute",
    "resume_from_checkpoint": "checkpoint.resume_from",
    "rope_theta": "model.rotary_base",
    "run_name": "name",
    "save_folder": "checkpoint.folder",
    "save_interval": "checkpoint.interval",
    "save_num_checkpoints_to_keep": "checkpoint.keep",
    "save_overwrite": "a step is never overwritten; give the run another name",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "sharding_strategy": "parallel.shard",
    "t_warmup": "schedule.warmup",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensor_parallel_degree": "parallel.tensor",
    "tie_word_embeddings": "model.tied",
    "tokenizer_path": "data.tokenizer",
    "train_iters": "max_duration",
    "train_loader": "training data is set by data.path",
    "training_steps": "max_duration",
    "vocab_size": "model.vocab",
    "warmup_steps": "schedule.warmup",
}


def hint_for(path: str) -> str:
    """A remedy for the unknown key `path`."""
    section, _, leaf = path.rpartition(".")
    if path in all_fields() or path in all_sections():
        return f"{path} is a key inside a section: write {section}: and below it {leaf}:"
    for name in (path, path.partition(".")[0], leaf):
        if name in ELSEWHERE:
            meant = ELSEWHERE[name]
            return meant if " " in meant else f"keepstep calls it {meant}"
    same_leaf = [other for other in all_fields() if other.rpartition(".")[2] == leaf]
    if same_leaf:
        near = nearest(path, same_leaf, 0.8)
        return f"did you mean {near or listed(same_leaf)}?"
    alike = _most_like(section, leaf)
    return f"did you mean {alike}?" if alike else "keepstep config reference lists every key"


def hint_for_section(path: str) -> str:
    """A remedy for an unknown key that holds several others."""
    near = nearest(path, list(all_sections()))
    if near and path not in ELSEWHERE:
        return f"did you mean {near}?"
    return hint_for(path)


def _most_like(section: str, leaf: str) -> str | None:
    """The key whose own name is most like `leaf`, be it ours or another tool's; the section decides between equals."""
    names = [(path.rpartition(".")[2], path) for path in all_fields()]
    names += [(name, meant) for name, meant in ELSEWHERE.items() if " " not in meant]
    best, best_score = None, 0.0
    for name, path in names:
        alike = SequenceMatcher(None, leaf.lower(), name).ratio()
        score = alike + 0.5 * SequenceMatcher(None, section.lower(), path.rpartition(".")[0]).ratio()
        if alike >= _ALIKE and score > best_score:
            best, best_score = path, score
    return best
