"""Rules across fields: each names the fault, the rule and values that work."""

from __future__ import annotations

import pytest

from keepstep.config.check import RULES, check_conversations, check_shape
from keepstep.config.fields import all_fields
from keepstep.config.layout import accumulation_steps
from keepstep.config.load import load_config
from keepstep.config.presets import ALIASES, PRESETS
from keepstep.config.ranges import Range
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.core.units import ByteSize, Duration

MIXTURE = ["model=llama-1b", "model.experts.count=8"]
FLASH = ["model=llama-1b", "precision=bf16", "compute.attention=flash"]


def report(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return "\n".join(caught.value.lines())


def test_every_number_has_a_range_at_its_field() -> None:
    numbers = (int, float, Duration, ByteSize, tuple[float, float])
    bounded = {path for path, field in all_fields().items() if field.range not in (None, Range(word="auto"))}
    assert {path for path, field in all_fields().items() if field.type in numbers} == bounded


def test_defaults_are_inside_their_ranges() -> None:
    assert [path for path, field in all_fields().items() if field.range and not field.range.holds(field.default)] == []


def test_rules_name_fields_that_exist() -> None:
    assert len(RULES) >= 25
    assert {name for rule in RULES for name in rule.fields} <= set(all_fields())


DYNAMIC = "{rope_type: dynamic, factor: 2, original_max_position_embeddings: 8192}"
LATENT = ["model=deepseek-v3", "model.experts.count=0"]


@pytest.mark.parametrize("path", [path for path, field in all_fields().items() if field.range == Range(above=0)])
def test_zero_is_refused_where_something_must_be(path: str) -> None:
    zero = "0ba" if all_fields()[path].type is Duration else "0"
    shown = {"0": "0.0"}.get(zero, zero) if all_fields()[path].type is float else zero
    assert f"{path} is {shown}, but it must be above 0" in report(f"{path}={zero}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=-1"], "seed is -1, but it must be at least 0"),
        ([*MIXTURE, "model.experts.top_k=9"], "model.experts.top_k is 9, but it must be at most 8, the experts"),
        (
            [*MIXTURE, "model.experts.groups=4", "model.experts.top_k=3"],
            "must be at most 2, the experts that a token may use in 1 of 4 groups",
        ),
        ([*MIXTURE, "model.experts.groups=3"], "it must divide model.experts.count (8)\n hint: model.experts.groups=2"),
        ([*MIXTURE, "model.experts.top_groups=2"], "it must be at least model.experts.top_groups (2)"),
        ([*MIXTURE, "model.experts.shared_gate=true"], "it needs a shared expert"),
        ([*MIXTURE, "model.experts.first_dense_layers=99"], "none of the 16 layers has experts"),
        ([*MIXTURE, "model.activation=gelu"], "it needs model.activation swiglu, and it is gelu"),
        ([*MIXTURE, "model.bias=true"], "without biases, and model.bias is true"),
        ([*MIXTURE, "model.linear=bitnet"], "it needs model.linear dense, and it is bitnet"),
        ([*MIXTURE, "parallel.expert=3"], "it must divide model.experts.count (8)\n hint: parallel.expert=2 or 4"),
        (["parallel.expert=2"], "parallel.expert is 2, but it needs a model with experts"),
        (
            [*MIXTURE, "parallel.expert=2", "compute.recompute=selective"],
            "compute.recompute is 'selective', but it does not support parallel.expert above 1",
        ),
        ([*MIXTURE, "parallel.expert=2", "reproducible=elastic"], "parallelism only, and parallel.expert is not 1"),
        (
            [*MIXTURE, "parallel.pipeline=2", "parallel.schedule=zero_bubble"],
            "it splits the backward pass, which experts cannot",
        ),
        (
            [*MIXTURE, "parallel.pipeline=2", "model.experts.aux_loss=1", "compute.recompute=full"],
            "it must be none with parallel.pipeline above 1 and losses of routers",
        ),
        (
            [*MIXTURE, "precision=fp8", "model.experts.bias=true"],
            "precision is 'fp8', but it does not support experts with biases or clipped SwiGLU",
        ),
        ([*MIXTURE, "lora.rank=8", "lora.targets=[q, up]"], "has up, and experts take no such adapter"),
        (
            ["model=gpt3-125m", "lora.rank=8", "lora.targets=[q, gate]"],
            "has gate, and model.activation gelu_tanh has no gate",
        ),
        (["lora.targets=[all, w1]"], "must be all or name some of q, k, v, o, gate, up, down"),
        (["model=deepseek-v3", "lora.rank=8", "lora.targets=[q, k, o]"], "has k, and latent attention takes no such"),
        (["lora.base=fp8"], "lora.base is 'fp8', but it is for the frozen weights under adapters, and lora.rank is 0"),
        (
            ["lora.rank=8", "lora.base=nf4", "precision=fp8"],
            "lora.base is 'nf4', but it computes in bf16, and precision",
        ),
        (["lora.rank=8", "precision=fp8", "parallel.pipeline=2"], "whole on each GPU: needs parallel.pipeline=1"),
        ([*MIXTURE, "lora.rank=8", "lora.targets=[q]", "lora.base=fp8"], "does not quantise experts"),
        (["lora.rank=8", "model.linear=bitnet"], "lora.rank is 8, but it needs model.linear dense, and it is bitnet"),
        (["model.dropout=1"], "model.dropout is 1.0, but it must be at least 0 and below 1"),
        (
            ["optimizer.betas=[0.9,1]"],
            "optimizer.betas is [0.9, 1.0], but it must have every value at least 0",
        ),
        (["schedule.final=1.1"], "schedule.final is 1.1, but it must be at least 0 and at most 1"),
        (["schedule.stage_at=1"], "schedule.stage_at is 1.0, but it must be above 0 and below 1"),
        (["parallel.shard=0"], "parallel.shard is 0, but it must be above 0, or -1"),
        (
            ["model.hidden=100"],
            "must be a multiple of model.heads (12)\n hint: model.heads=10 or 20, or set model.head_dim",
        ),
        (["model.heads=8", "model.kv_heads=3"], "must divide model.heads (8)\n hint: model.kv_heads=1, 2, 4 or 8"),
        (["model.positions=rotary", "model.head_dim=63"], "RoPE rotates pairs of numbers, and the head size is 63"),
        (["model.max_positions=1024"], "model.seq_len is 2048, but it must be at most model.max_positions (1024)"),
        (["model.rotary_scaling={factor: 2}"], "needs model.positions rotary, not learned"),
        (["model.partial_rotary_factor=0.5"], "needs model.positions rotary, not learned"),
        (["model.no_rope_layer_interval=4"], "needs model.positions rotary, not learned"),
        (["model.head_qk_norm=false"], "model.head_qk_norm is false, but it needs model.qk_norm"),
        (["model.layer_types=[sliding_attention]"], "needs a model.sliding_window for its sliding layers"),
        (["model=llama-1b", "model.rotary_local_base=100"], "sliding layers in model.layer_types"),
        (
            ["model=llama-1b", f"model.rotary_scaling={DYNAMIC}", "parallel.context=2"],
            "must be 1 with model.rotary_scaling dynamic or longrope",
        ),
        (["model=deepseek-v3", "model.kv_lora_rank=0"], "model.kv_lora_rank is 0, but it is needed by model.q_lora"),
        (["model=deepseek-v3", "model.qk_rope_head_dim=192"], "needs an even model.qk_rope_head_dim between 0 and"),
        (["model=deepseek-v3", "model.v_head_dim=256"], "needs model.v_head_dim of at most"),
        (["model=deepseek-v3", "model.qk_norm=true"], "does not support model.qk_norm"),
        (
            ["model.attention_sinks=true", "compute.attention=flash", "reproducible=off", "precision=bf16"],
            "computes no model.attention_sinks",
        ),
        (
            ["model.attn_logit_softcapping=50", "compute.attention=cudnn", "reproducible=off", "precision=bf16"],
            "computes no soft-capped scores",
        ),
        (
            ["model=llama-1b", "model.partial_rotary_factor=0.05"],
            "makes 3 of 64 channels, which must be an even number",
        ),
        (["microbatch=7"], "multiple of microbatch (7)\n hint: global_batch=252 or 259, or microbatch=4 or 8"),
        (
            ["model=llama-8b", "parallel.tensor=3"],
            "parallel.tensor is 3, but it must divide model.kv_heads (8)\n hint: parallel.tensor=1, 2, 4 or 8",
        ),
        (["model.ffn_hidden=30", "parallel.tensor=4"], "feed-forward width (30)\n hint: parallel.tensor=1, 2, 3 or 6"),
        (["name=../x"], "must be one safe folder name"),
        (["name=."], "must be one safe folder name"),
        (["compute.device=cpu", "compute.attention=flash"], "needs a GPU"),
        (["precision=fp32", "compute.attention=cudnn"], "precision=bf16"),
        (["model.positions=alibi", "precision=bf16", "compute.attention=flash"], "takes no bias"),
        (
            [*FLASH, "model.sliding_window=64", "parallel.pipeline=2"],
            "compute.attention is 'flash', but it takes no mask, which a model.sliding_window shorter than a row needs "
            "where parallel.pipeline is not 1\n hint: compute.attention=auto",
        ),
        ([*FLASH, "model.sliding_window=64", "parallel.context=2"], "needs where parallel.context is not 1"),
        ([*FLASH, "data.separate_documents=true", "parallel.pipeline=2"], "which data.separate_documents needs where"),
        (
            [*FLASH, "data.strategy=best_fit", "parallel.pipeline=2", "parallel.context=2"],
            "which data.strategy best_fit needs where parallel.pipeline and parallel.context is not 1",
        ),
        (
            ["max_duration=2h"],
            "max_duration is 7200s, but it is a time, and schedule.name cosine needs the number of",
        ),
        (["schedule.warmup=5min"], "schedule.warmup is 300s, but it must be in steps, samples, tokens or epochs"),
        (["checkpoint.skip_optimizer=true"], "needs checkpoint.resume_from, which is empty"),
    ],
)
def test_broken_rules_are_named_with_values_that_work(words: list[str], expected: str) -> None:
    found = report(*words)
    assert expected in found
    assert found.count("error:") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["model.sliding_window=64"],
        ["data.separate_documents=true", "parallel.tensor=2"],
        ["parallel.pipeline=2"],
        ["parallel.context=2", "model.sliding_window=999999"],
        ["data.separate_documents=true", "parallel.pipeline=2", "compute.attention=auto"],
        ["model.sliding_window=64", "parallel.pipeline=2", "compute.attention=cudnn"],
    ],
)
def test_flash_attention_may_be_asked_for_where_it_needs_no_mask(words: list[str]) -> None:
    load_config(None, [*FLASH, *words])


def test_conversations_are_documents_to_flash_attention() -> None:
    check_conversations(load_config(None, FLASH).config)
    with pytest.raises(ConfigError, match="takes no mask, which a row of conversations needs") as caught:
        check_conversations(load_config(None, [*FLASH, "parallel.context=2"]).config)
    assert caught.value.hint == "compute.attention=auto"


def test_a_run_may_end_by_the_clock_where_its_learning_rate_has_no_end_to_reach() -> None:
    assert load_config(None, ["max_duration=2h", "schedule.name=constant"]).config.max_duration.value == 7200


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_every_preset_is_sound_as_it_is_and_narrow(name: str) -> None:
    assert load_config(None, [f"model={name}"]).config.model.preset == name
    assert load_config(None, [f"model={name}", "model.layers=2", "model.hidden=64"]).config.model.hidden == 64


def test_a_rule_is_not_asked_about_a_value_that_is_already_wrong() -> None:
    assert report("model.heads=0", "model.hidden=x").count("error:") == 2


def test_check_shape_reports_all_shape_errors_of_a_model() -> None:
    check_shape(ModelConfig())
    with pytest.raises(ConfigError, match=r"model\.kv_heads is 5, but it must divide") as caught:
        check_shape(ModelConfig(hidden=100, kv_heads=5))
    assert len(caught.value.problems) == 2


def test_accumulation_follows_from_batch_and_ranks() -> None:
    assert accumulation_steps(256, 8, 4) == 8
    assert accumulation_steps(8, 8, 1) == 1


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "hint"),
    [
        (256, 8, 3, "global_batch=240 or 264, or 2 or 4 data-parallel processes"),
        (256, 12, 2, "global_batch=240 or 264, or microbatch=8 or 16"),
        (4, 8, 1, "global_batch=8, or microbatch=4"),
    ],
)
def test_accumulation_that_does_not_divide_names_what_would(batch: int, micro: int, ranks: int, hint: str) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of") as caught:
        accumulation_steps(batch, micro, ranks)
    assert caught.value.hint == hint


def test_every_whole_number_has_an_upper_bound() -> None:
    """What is computed from a number must end: divisors, layers, bytes."""
    huge = 99999999999999999999
    for path, field in all_fields().items():
        if field.type is int:
            assert field.range is not None, path
            assert not field.range.holds(huge), path
    assert f"model.hidden is {huge}, but it must be above 0 and at most 16777216" in report(f"model.hidden={huge}")
    assert "model.layers is 1000000000, but it must be above 0 and at most 10000" in report("model.layers=1000000000")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.rotary_scaling={factor: 8}", "has no rope_type: it must be default, linear, llama3, yarn, dynamic or"),
        ("model.rotary_scaling={rope_type: axial}", "has the rope_type 'axial', which is not supported"),
        (
            "model.rotary_scaling={rope_type: yarn, factor: 8}",
            "needs original_max_position_embeddings for rope_type yarn",
        ),
        (
            "model.rotary_scaling={rope_type: yarn, factor: 8, original_max_position_embeddings: 64, beta_fast: x}",
            "needs beta_fast for rope_type yarn, above 0",
        ),
        ("model.rotary_scaling={rope_type: linear, factor: x}", "needs factor for rope_type linear"),
        (
            "model.rotary_scaling={rope_type: llama3, factor: 8}",
            "needs low_freq_factor, high_freq_factor, original_max",
        ),
        ("data.blend={web: 0.5, code: x}", "must have a weight above 0 for code"),
        ("data.blend={web: 0.5, code: 0}", "must have a weight above 0 for code"),
        ("data.blend={web: .nan}", "must have a weight above 0 for web"),
        ("seed=99999999999999999999", "must be at least 0 and at most 10000000000000"),
        ("seed=-1", "must be at least 0"),
    ],
)
def test_free_values_are_checked_before_anything_starts(word: str, message: str) -> None:
    assert message in report("model=llama-1b", word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.strategy=best_fit", "it concatenates documents, and data.strategy is best_fit"),
        ("data.shuffle=false", "it has its own shuffle"),
        ("data.shuffle_window=100", "it has its own shuffle"),
        ("seed=4294967296", "it takes seeds below 4294967296"),
    ],
)
def test_what_the_order_of_megatron_cannot_do_is_not_ignored(word: str, message: str) -> None:
    assert message in report("model=llama-1b", "data.order=gpt", word)
    load_config(None, ["model=llama-1b", word])
    load_config(None, ["model=llama-1b", "data.order=gpt", "data.separate_documents=true", "seed=4294967295"])


def test_free_values_that_are_sound_pass() -> None:
    llama3 = "factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8192"
    for scaling in ("{type: linear, factor: 2}", "{rope_type: default}", f"{{rope_type: llama3, {llama3}}}"):
        load_config(None, ["model=llama-1b", f"model.rotary_scaling={scaling}", "data.blend={web: 7, code: 0.3}"])
