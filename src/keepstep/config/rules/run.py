"""Rules of the run itself: its name, batch, data, objective, schedule and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keepstep.config.rules import Found, around, divisors, is_positive, multiples_around, rule
from keepstep.config.schema import RunConfig
from keepstep.core.messages import listed
from keepstep.core.plugins import is_plugin, plugin_problem


@rule("name")
def name_is_a_folder(config: RunConfig) -> Found:
    """The name becomes a folder and part of job names."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        return None
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip("-._")[:100] or "run"
    return "must be one safe folder name: letters, digits, dot, dash and underscore, at most 100", f"name={safe}"


@rule("global_batch", "microbatch")
def microbatches_fill_the_batch(config: RunConfig) -> Found:
    """A step is a whole number of micro batches."""
    if not config.microbatch or config.global_batch % config.microbatch == 0:
        return None
    batches = multiples_around(config.microbatch, config.global_batch)
    micro = around(divisors(config.global_batch), config.microbatch)
    needs = f"must be a multiple of microbatch ({config.microbatch})"
    return needs, f"global_batch={listed(batches)}, or microbatch={listed(micro)}"


@rule("data.blend")
def blend_has_weights(config: RunConfig) -> Found:
    """Every data set of a blend has a usable weight."""
    wrong = [path for path, weight in config.data.blend.items() if not is_positive(weight)]
    if not wrong:
        return None
    return f"must have a weight above 0 for {', '.join(wrong)}", f"data.blend={{{wrong[0]}: 0.5, …}}, or leave it out"


@rule("data.order", "data.strategy", "data.shuffle", "data.shuffle_window", "seed")
def megatron_order_decides_alone(config: RunConfig) -> Found:
    """GPTDataset concatenates documents, always shuffles, and seeds a generator of 32 bits."""
    data = config.data
    if data.order != "gpt":
        return None
    if data.strategy != "pack":
        return f"concatenates documents, and data.strategy is {data.strategy}", "data.strategy=pack"
    if not data.shuffle or data.shuffle_window:
        return (
            "has its own shuffle, which data.shuffle and data.shuffle_window do not change",
            "leave both out, or data.order=keepstep",
        )
    if config.seed >= 1 << 32:
        return f"takes seeds below {1 << 32}, and seed is {config.seed}", "seed=1234, or the Megatron run's seed"
    return None


@rule("chat.read_first")
def read_first_is_counted_in_rows(config: RunConfig) -> Found:
    """Epochs and seconds cannot be turned into rows before the run."""
    if config.chat.read_first.unit in ("ba", "sp", "tok"):
        return None
    return "must be in steps, samples or tokens", "chat.read_first=200ba"


@rule(
    "preference.method", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision", "chat.loss_on",
    "chat.read_first",
)  # fmt: skip
def preference_needs_whole_answers(config: RunConfig) -> Found:
    """The log-probability of an answer is summed on one process; only answers are compared."""
    return None if config.preference.method == "none" else _whole_answers(config)


@rule(
    "rl.method", "preference.method", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision",
    "chat.loss_on", "chat.read_first",
)  # fmt: skip
def rl_needs_whole_answers(config: RunConfig) -> Found:
    """A run learns from given answers or from its own."""
    if config.rl.method == "none":
        return None
    if config.preference.method != "none":
        needs = f"cannot be combined with preference.method {config.preference.method}"
        return needs, "rl.method=none, or preference.method=none"
    return _whole_answers(config)


def _whole_answers(config: RunConfig) -> Found:
    split = [axis for axis in ("tensor", "context", "pipeline") if getattr(config.parallel, axis) > 1]
    if split:
        return f"needs parallel.{split[0]}=1", "use parallel.shard and parallel.replicate"
    if config.precision == "fp8":
        return "needs matmuls in bf16, and precision is fp8", "precision=bf16"
    if config.chat.loss_on == "all" or config.chat.read_first.value:
        return "compares what the assistant says alone", "leave chat.loss_on and chat.read_first out"
    return None


@rule("microbatch", "global_batch", "rl.num_generations", "rl.method")
def groups_are_whole(config: RunConfig) -> Found:
    """A micro batch holds all answers to a prompt, which are compared with each other."""
    # Where the plan chooses it, some divisor of the global batch must do.
    name, rows = ("microbatch", config.microbatch) if config.microbatch else ("global_batch", config.global_batch)
    group = config.rl.num_generations
    if config.rl.method == "none" or rows % group == 0:
        return None
    return f"must be a multiple of rl.num_generations ({group})", f"{name}={listed(multiples_around(group, rows))}"


@rule("rl.max_new_tokens", "rl.method", "model.seq_len")
def answers_fit_a_row(config: RunConfig) -> Found:
    """Prompt and answer share a row."""
    if config.rl.method == "none" or config.rl.max_new_tokens < config.model.seq_len:
        return None
    return f"must be below model.seq_len ({config.model.seq_len})", "leave room for the prompt in model.seq_len"


_REWARDS = ("tool_calls", "arguments", "schema", "format")


@rule("rl.rewards", "rl.method")
def rewards_are_known(config: RunConfig) -> Found:
    """Each is built in or a plug-in, with a weight."""
    if config.rl.method == "none":
        return None
    if not config.rl.rewards:
        return "must name a reward", "rl.rewards={tool_calls: 1.0}"
    for name, weight in config.rl.rewards.items():
        if not (is_positive(weight) or is_positive(-weight)):
            return f"must have a weight other than 0 for {name}", f"rl.rewards={{{name}: 1.0}}"
        problem = None if name in _REWARDS else plugin_problem("rewards", name, _REWARDS)
        if problem is not None:
            return f"has {name}, which {problem[0]}", problem[1]
    return None


@rule("preference.label_smoothing", "preference.method")
def label_smoothing_needs_dpo(config: RunConfig) -> Found:
    """The other losses have no term for it."""
    if not config.preference.label_smoothing or config.preference.method == "dpo":
        return None
    return f"has no effect with preference.method {config.preference.method}", "preference.method=dpo, or leave it out"


@rule("max_duration", "schedule.name")
def decay_needs_a_known_end(config: RunConfig) -> Found:
    """A decaying learning rate needs the number of steps in advance."""
    if config.max_duration.unit != "s" or config.schedule.name == "constant":
        return None
    needs = f"is a time, and schedule.name {config.schedule.name} needs the number of steps in advance"
    return needs, "schedule.name=constant, or max_duration in steps (100ba), samples, tokens or epochs"


@rule("schedule.warmup")
def warmup_is_counted_in_steps(config: RunConfig) -> Found:
    """Warmup ends at a step that is known in advance."""
    if config.schedule.warmup.unit != "s":
        return None
    return "must be in steps, samples, tokens or epochs", "schedule.warmup=100ba"


@rule("checkpoint.skip_optimizer", "checkpoint.resume_from")
def skip_optimizer_needs_a_source(config: RunConfig) -> Found:
    """Only a start from another step can leave the optimizer out."""
    if not config.checkpoint.skip_optimizer or config.checkpoint.resume_from:
        return None
    return "needs checkpoint.resume_from, which is empty", "set checkpoint.resume_from to a step folder"


@rule("evaluate.prompts", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision")
def prompts_need_whole_rows(config: RunConfig) -> Found:
    """Generation during a run needs a process that computes a row alone."""
    if not config.evaluate.prompts:
        return None
    split = [axis for axis in ("tensor", "context", "pipeline") if getattr(config.parallel, axis) > 1]
    if not split and config.precision != "fp8":
        return None
    why = f"parallel.{split[0]} is {getattr(config.parallel, split[0])}" if split else "precision is fp8"
    needs = f"needs each process to compute whole rows, and not in fp8, but {why}"
    return needs, "evaluate.prompts=[]; keepstep chat answers from the run's checkpoints"


@rule("observe.callbacks")
def callbacks_are_known(config: RunConfig) -> Found:
    """Each is a plug-in with a mapping of options, or none."""
    for name, options in config.observe.callbacks.items():
        if not isinstance(options, Mapping | None):
            return f"must have a mapping of options for {name}", f"observe.callbacks={{{name}: {{}}}}"
        problem = plugin_problem("callbacks", name)
        if problem is not None:
            return f"has {name}, which {problem[0]}", problem[1]
    return None


@rule("data.options", "data.path", "data.blend")
def data_options_need_a_plugin(config: RunConfig) -> Found:
    """Data that is no plug-in takes no options."""
    data = config.data
    if not data.options or any(is_plugin("data", path) for path in (data.blend or (data.path,))):
        return None
    return f"is for plug-ins, and data.path {data.path} is none", "install the plug-in's package, or leave it out"
