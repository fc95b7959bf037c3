"""What a user writes becomes one frozen config, or a list of everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.fields import all_fields, value_at
from keepstep.config.hints import other_tools
from keepstep.config.load import LoadedConfig, load_config, split_words
from keepstep.config.reference import reference_of
from keepstep.config.schema import RENAMED
from keepstep.core.errors import ConfigError, UsageError
from keepstep.core.units import Duration
from tests.doc_blocks import ROOT


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")


def load(path: Path, text: str, *overrides: str) -> LoadedConfig:
    path.write_text(text)
    return load_config(path, overrides)


def problems(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return "\n".join(caught.value.lines())


def test_overrides_beat_the_file_the_file_beats_the_preset_the_preset_beats_the_default(run_yaml: Path) -> None:
    loaded = load(run_yaml, "model: llama-1b\noptimizer:\n  lr: 1e-4\nseed: 3\n", "seed=4", "model.layers=2")
    config, origins = loaded.config, {path: str(origin) for path, origin in loaded.origins.items()}
    assert (config.model.hidden, origins["model.hidden"]) == (2048, "preset llama-1b")
    assert (config.model.preset, origins["model.preset"]) == ("llama-1b", "run.yaml:1")
    assert (config.model.layers, origins["model.layers"]) == (2, "command line")
    assert (config.optimizer.lr, origins["optimizer.lr"]) == (1e-4, "run.yaml:3")
    assert (config.seed, origins["seed"]) == (4, "command line")
    assert (config.global_batch, origins["global_batch"]) == (256, "default")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_renamed_fields_are_read_by_their_old_names(old: str, new: str, run_yaml: Path) -> None:
    section, _, name = old.rpartition(".")
    changed = not all_fields()[new].default
    loaded = load(run_yaml, f"{section}: {{{name}: {str(changed).lower()}}}\n")
    assert value_at(loaded.config, new) == changed
    assert str(loaded.origins[new]) == "run.yaml:1"
    assert value_at(load_config(None, [f"{old}={changed}"]).config, new) == changed
    assert load_config(None, [f"name=${{{old}}}"]).config.name == str(not changed).lower()
    assert reference_of([old]).startswith(f"{new}:")


def test_renamed_field_may_not_be_given_by_both_names(run_yaml: Path) -> None:
    run_yaml.write_text("compute:\n  fused_matmuls: true\n  joined_products: false\n")
    assert problems(run_yaml) == (
        "error: run.yaml:3 compute.joined_products is the old name of compute.fused_matmuls, which is given too\n"
        " hint: keep compute.fused_matmuls"
    )


def test_the_new_name_on_the_command_line_beats_the_old_one_in_the_file(run_yaml: Path) -> None:
    assert load(
        run_yaml, "compute: {joined_products: false}\n", "compute.fused_matmuls=true"
    ).config.compute.fused_matmuls


def test_a_typo_of_an_old_name_is_answered_with_the_new_one() -> None:
    assert "did you mean compute.fused_matmuls?" in problems(None, "compute.joined_product=false")


def test_the_config_is_frozen() -> None:
    config = load_config(None).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_a_plain_value_for_a_section_keeps_its_other_fields(run_yaml: Path) -> None:
    config = load(run_yaml, "model:\n  layers: 3\n", "model=mpt-125m", "schedule=wsd", "data=synthetic").config
    assert (config.model.preset, config.model.layers, config.model.hidden) == ("mpt-125m", 3, 768)
    assert (config.schedule.name, config.data.path) == ("wsd", "synthetic")


def test_a_narrower_preset_keeps_its_proportions() -> None:
    model = load_config(None, ["model=llama-8b", "model.hidden=${variables.w}", "variables.w=1024"]).config.model
    assert (model.heads, model.kv_heads, model.ffn_hidden) == (8, 2, 3584)


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("optimizer.lr=1e-4", "lr", 1e-4),
        ("optimizer.lr=1E-4", "lr", 1e-4),
        ("optimizer.lr=1", "lr", 1.0),
        ("optimizer.betas=[0.8, 0.9]", "betas", (0.8, 0.9)),
        ("optimizer=muon", "name", "muon"),
        ("optimizer.decay_norms=true", "decay_norms", True),
    ],
)
def test_values_take_the_type_of_their_field(word: str, field: str, value: object) -> None:
    found = getattr(load_config(None, [word]).config.optimizer, field)
    assert found == value
    assert type(found) is type(value)


def test_texts_that_look_like_something_else_stay_texts() -> None:
    config = load_config(
        None, ["name=125", "data.path=no", "data.tokenizer=1e5", "data.valid_path=", "runs_dir=a=b"]
    ).config
    assert (config.name, config.data.path, config.data.tokenizer) == ("125", "no", "1e5")
    assert (config.data.valid_path, config.runs_dir) == ("", "a=b")


def test_large_whole_numbers_may_be_written_short() -> None:
    assert load_config(None, ["seed=1e5"]).config.seed == 100_000
    assert load_config(None, ["seed=1_000"]).config.seed == 1000
    assert "must be a whole number" in problems(None, "seed=1.5")


def test_references_keep_the_type_and_reach_any_value(run_yaml: Path) -> None:
    text = """
variables: {size: 64, twice: "${variables.size}", tag: a}
model: {preset: mpt-tiny, seq_len: "${variables.twice}"}
evaluate: {interval: "${checkpoint.interval}"}
name: ${variables.tag}-${model.layers}-${max_duration}
runs_dir: $${HOME}
"""
    loaded = load(run_yaml, text)
    config = loaded.config
    assert config.model.seq_len == 64
    assert config.evaluate.interval == Duration(1000, "ba")
    assert config.name == "a-4-1000ba"
    assert config.runs_dir == "${HOME}"
    assert config.variables == {"size": 64, "twice": 64, "tag": "a"}
    assert loaded.origins["model.seq_len"].kind == "interpolation"
    assert str(loaded.origins["model.seq_len"]) == "run.yaml:3 ${variables.twice}"


def test_a_reference_may_be_given_on_the_command_line_and_variables_are_merged(run_yaml: Path) -> None:
    config = load(run_yaml, "variables: {a: 1, b: 2}\n", "variables.b=5", "seed=${variables.b}").config
    assert config.seed == 5
    assert config.variables == {"a": 1, "b": 5}


def test_broken_references_are_reported_with_a_way_out(run_yaml: Path) -> None:
    run_yaml.write_text("""\
variables: {size: 1}
seed: ${variables.sise}
microbatch: ${global_batch}
global_batch: ${microbatch}
name: ${optimizer}
runs_dir: ${model.hiden}
data: ${variables
""")
    report = problems(run_yaml)
    assert (
        "run.yaml:2 ${variables.sise} names a key that does not exist\n hint: did you mean ${variables.size}?" in report
    )
    assert "refers to itself: global_batch → microbatch → global_batch" in report
    assert "run.yaml:5 ${optimizer} names a section, not a value" in report
    assert "run.yaml:6 ${model.hiden} names a key that does not exist\n hint: did you mean model.hidden?" in report
    assert "run.yaml:7" in report
    assert report.count("error:") == 5


def test_everything_wrong_is_reported_at_once_with_its_line(run_yaml: Path) -> None:
    run_yaml.write_text("""\
# all of it is wrong
seed: 1.5
model: lama-1b
optimizer:
  lr: x
  nmae: adamw
compute: {compile: yes}
max_duration: 100
precision: bf61
""")
    report = problems(run_yaml, "optimzer.lr=x", "parallel.tensro=2", "global_batch=7", "microbatch=8")
    expected = """\
error: run.yaml:2 seed is 1.5, but it must be a whole number
error: run.yaml:3 model.preset is 'lama-1b', but it must be a preset's name or custom
 hint: did you mean llama-1b?
error: run.yaml:5 optimizer.lr is 'x', but it must be a number
error: run.yaml:6 unknown key optimizer.nmae
 hint: did you mean optimizer.name?
error: run.yaml:7 compute.compile is 'yes', but it must be true or false, or auto
 hint: write true
error: run.yaml:8 max_duration is 100, but it needs a number and a unit"""
    assert report.startswith(expected)
    assert (
        "run.yaml:9 precision is 'bf61', but it must be auto, fp32, bf16, fp16 or fp8\n hint: did you mean bf16?"
        in report
    )
    assert "command line: unknown key optimzer.lr\n hint: did you mean optimizer.lr?" in report
    assert "command line: unknown key parallel.tensro\n hint: did you mean parallel.tensor?" in report
    assert "command line: global_batch is 7, but it must be a multiple of microbatch (8)" in report


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("optimizer.learnign_rate", "optimizer.lr"),
        ("save_interval", "checkpoint.interval"),
        ("save_folder", "checkpoint.folder"),
        ("save_num_checkpoints_to_keep", "checkpoint.keep"),
        ("eval_interval", "evaluate.interval"),
        ("device_train_microbatch_size", "microbatch"),
        ("global_train_batch_size", "global_batch"),
        ("fsdp_config.sharding_strategy", "parallel.shard"),
        ("model.n_layers", "model.layers"),
        ("model.d_model", "model.hidden"),
        ("checkpont.keep", "checkpoint.keep"),
        ("max_durration", "max_duration"),
        ("optimizer.weigth_decay", "optimizer.weight_decay"),
        ("checkpont.interval", "checkpoint.interval"),
        ("xyzzy", "keepstep config reference"),
    ],
)
def test_unknown_keys_come_with_the_key_that_was_meant(key: str, meant: str) -> None:
    report = problems(None, f"{key}=1")
    assert f"unknown key {key}" in report
    assert meant in report.split("hint:")[1]


def page_rows() -> list[tuple[str, str]]:
    """Names and keys of the tables in docs/coming-from.md that are about scripts."""
    page = (ROOT / "docs" / "coming-from.md").read_text().partition("## A torchrun script")[2]
    rows = re.findall(r"^\| (.+?) \| `([\w.]+)` \|", page, re.M)
    return [(name, key) for names, key in rows for name in re.findall(r"`(?:--)?(\w+)`", names)]


@pytest.mark.parametrize(("name", "key"), page_rows())
def test_flags_of_other_scripts_get_the_key_that_the_page_names(name: str, key: str) -> None:
    if name in all_fields():
        assert name == key
        return
    hint = problems(None, f"{name}=1").split("hint:")[1]
    assert re.search(rf"\b{re.escape(key)}\b", hint), hint


def test_the_page_has_every_flag_of_the_script() -> None:
    flags = "data_dir data_name local_cache_dir config tokenizer_dir output_dir tensorboard_dir global_batch"
    flags += " local_batch train_steps enable_tensorboard bf16 ckpt_type resume_dir skip_optimizer eval_every"
    assert set(flags.split()) <= {name for name, _ in page_rows()}
    assert "write max_duration=3ep" in problems(None, "epochs=3")


def test_other_tools_names_each_name_once() -> None:
    table = yaml.safe_load((resources.files("keepstep.config") / "other_tools.yaml").read_text())
    assert len(" ".join(table.values()).split()) == len(other_tools())


def test_every_hint_for_a_foreign_name_points_at_a_real_key() -> None:
    assert [name for name, meant in other_tools().items() if " " not in meant and meant not in all_fields()] == []
    assert [name for name in other_tools() if name in all_fields()] == []


def test_an_unknown_section_is_one_problem(run_yaml: Path) -> None:
    run_yaml.write_text("optimiser:\n  lr: 1\n  clip: 2\n")
    assert problems(run_yaml) == "error: run.yaml:1 unknown section optimiser\n hint: did you mean optimizer?"


def test_a_section_with_nothing_in_it_is_no_mistake(run_yaml: Path) -> None:
    assert load(run_yaml, "optimizer:\n# lr: 1\nmodel: {}\n").config == load_config(None).config
    assert load(run_yaml, "").config == load_config(None).config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", "run.yaml:2 the key seed is given twice, first at run.yaml:1"),
        ("a: [1\nb: 2\n", "run.yaml:2 is not valid YAML"),
        ("model:\n\tlayers: 2\n", "run.yaml:2 is not valid YAML"),
        ("seed: !!python/name:os.system\n", "run.yaml:1 the tag"),
        ("variables: &v {a: *v}\n", "this alias contains itself"),
        ("- 1\n", "must be keys and values"),
        ("parallel: 2\n", "run.yaml:1 parallel is 2, but it is a section"),
        ("seed: [1]\n", "run.yaml:1 seed is [1], but it must be a whole number"),
        ("seed: true\n", "run.yaml:1 seed is true, but it must be a whole number"),
        ("seed:\n", "run.yaml:1 seed is empty, but it must be a whole number"),
        ("optimizer: {lr: .inf}\n", "must be a finite number"),
        ("optimizer: {betas: [0.9]}\n", "must be a list of 2 values"),
        ("optimizer.lr: 1\n", "write optimizer: and below it lr:"),
        ("<<: {seed: 1}\n", "merge keys (<<) are not supported"),
        ("seed: 1\n---\nseed: 2\n", "is not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(run_yaml: Path, text: str, expected: str) -> None:
    run_yaml.write_text(text)
    assert expected in problems(run_yaml)


def test_aliases_that_multiply_are_refused_quickly(run_yaml: Path) -> None:
    lines = ["  a0: &a0 [1, 1]"] + [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    run_yaml.write_text("variables:\n" + "\n".join(lines) + "\n")
    assert "too large or too deeply nested" in problems(run_yaml)


def test_files_that_cannot_be_read_are_the_users_to_mend(run_yaml: Path, tmp_path: Path) -> None:
    assert "there is no file run.yaml" in problems(run_yaml)
    assert "cannot read" in problems(tmp_path)
    run_yaml.write_bytes(b"\xff\xfe\x00name")
    assert "is not UTF-8 text" in problems(run_yaml)


def test_words_are_a_file_and_overrides_in_any_order() -> None:
    assert split_words(["seed=1", "run.yaml", "a.b=c=d"]) == (Path("run.yaml"), ["seed=1", "a.b=c=d"])
    assert split_words([]) == (None, [])
    assert split_words(["runs/a=b/run.yaml"]) == (Path("runs/a=b/run.yaml"), [])
    with pytest.raises(UsageError, match=r"optimizer.lr") as caught:
        split_words(["run.yaml", "optimizer.lr"])
    assert caught.value.hint == "write optimizer.lr=VALUE to set it"
    with pytest.raises(UsageError) as caught:
        split_words(["run.yaml", "mpt-tiny"])
    assert caught.value.hint == "write model=mpt-tiny to choose this preset"


@settings(max_examples=150)
@given(text=st.text(alphabet=st.sampled_from("amodel:{}[]$&*!?-\"'# \n\t.,=1e<|>%@~"), max_size=60))
@pytest.mark.slow
def test_no_text_breaks_the_reader(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        load_config(path, [f"name={text}", f"{text}=1", f"variables.x={text}"])
    except ConfigError:
        return


def test_share_of_the_run_is_resolved_and_refused_for_the_run_itself() -> None:
    config = load_config(None, ["max_duration=500ba", "schedule.warmup=0.02dur"]).config
    assert str(config.schedule.warmup) == "10ba"
    with pytest.raises(ConfigError, match="max_duration is '1dur'"):
        load_config(None, ["max_duration=1dur"])
