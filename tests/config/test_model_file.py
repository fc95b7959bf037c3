"""`model: PATH/config.json` works like a preset, for each family; a resume does not need the file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from keepstep.cli.main import main
from keepstep.config.dump import dump_config, model_overrides, show_config
from keepstep.config.hf_config import model_config_from_hf
from keepstep.config.hf_rotary import FAMILIES
from keepstep.config.load import load_config
from keepstep.config.reference import json_schema
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.launch.profile_kinds import SlurmProfile
from keepstep.launch.profiles import commented
from tests.train.tiny_runs import losses, metrics

LLAMA_LIKE = {
    "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "rope_theta": 5000.0,
}  # fmt: skip
DEEPSEEK = {**LLAMA_LIKE, "num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
FILES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "mpt": {"n_layers": 2, "d_model": 32, "n_heads": 4, "max_seq_len": 64, "vocab_size": 128},
    "llama": {**LLAMA_LIKE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {**LLAMA_LIKE, "sliding_window": 16},
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 16},
    "olmo2": LLAMA_LIKE,
    "olmo3": {**LLAMA_LIKE, "sliding_window": 16},
    "granite": {**LLAMA_LIKE, "embedding_multiplier": 12, "logits_scaling": 8.0},
    "smollm3": LLAMA_LIKE,
    "gemma": LLAMA_LIKE,
    "gemma2": {**LLAMA_LIKE, "sliding_window": 16},
    "gemma3_text": {**LLAMA_LIKE, "sliding_window": 16},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "phi3": {**LLAMA_LIKE, "partial_rotary_factor": 0.75, "sliding_window": 16},
}


def write(folder: Path, family: str = "llama", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": family, **FILES.get(family, LLAMA_LIKE), **changes}))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_model_of_its_file(family: str, tmp_path: Path) -> None:
    path = write(tmp_path, family)
    fields = model_config_from_hf(json.loads(path.read_text()))
    for word in (f"model={path}", f"model.preset={tmp_path}"):
        loaded = load_config(None, [word])
        assert loaded.config.model == ModelConfig(**{**fields, "preset": str(path), "max_positions": 64})
        assert str(loaded.origins["model.layers"]) == f"preset {path}"


def test_given_fields_beat_the_file_and_widths_follow_hidden(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3", max_position_embeddings=40960)
    model = load_config(None, [f"model={path}", "model.layers=5", "model.hidden=64", "model.vocab=300"]).config.model
    assert (model.layers, model.hidden, model.vocab) == (5, 64, 300)
    assert (model.heads, model.kv_heads, model.head_dim, model.ffn_hidden) == (8, 4, 16, 160)
    # The model can have all positions of the file, but a row is as long as in fine-tuning unless it is set.
    assert (model.seq_len, model.max_positions) == (2048, 40960)


def test_relative_path_starts_here_or_next_to_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "shape", "llama", num_hidden_layers=3)
    (tmp_path / "runs" / "run.yaml").write_text("variables: {shape: shape}\nmodel: ${variables.shape}\n")
    assert load_config(Path("runs/run.yaml")).config.model.layers == 3
    write(tmp_path / "shape", "llama", num_hidden_layers=4)
    assert load_config(Path("runs/run.yaml")).config.model.layers == 4
    assert load_config(None, ["model=shape"]).config.model.preset == "shape/config.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"model_type": "deepseek_v32"}',
            "model_type is 'deepseek_v32', which is not supported: this decoder has no sparse attention with an "
            "indexer\n hint: known: gpt2",
        ),
        ("{}", "model_type is None, which is not supported"),
        ('{"model_type": "gpt2"}', "config.json does not say 'n_layer'"),
        (
            json.dumps({"model_type": "llama", **LLAMA_LIKE, "hidden_act": "gelu"}),
            "config.json has hidden_act = 'gelu'",
        ),
        ("[1]", "is list, not an object"),
        ("{", "cannot be read: Expecting property name"),
        ("[" * 100_000, "cannot be read: "),
        (None, "cannot read "),
    ],
)
def test_unusable_file_is_one_error_with_its_place(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    (tmp_path / "run.yaml").write_text(f"name: x\nmodel: {path}\n")
    assert main(["config", "check", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("error:") == said.count(" hint:") == 1
    assert re.match(rf"error: {tmp_path}/run.yaml:2 .*{path}", said)


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "x" * 5000 + ".json", "a/\x00"])
def test_name_without_a_file_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot (be )?read"):
        load_config(None, [f"model={name}"])


def test_shape_that_does_not_fit_is_reported_by_its_rule(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden is 32, but it must be a multiple of model\.heads \(5\)"):
        load_config(None, [f"model={write(tmp_path, 'gpt2', n_head=5)}"])


def test_recorded_model_and_overrides_do_not_need_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "$" / "a b")
    loaded = load_config(None, [f"model={path}", "model.dropout=0.1"])
    recorded, shown = tmp_path / "config.yaml", tmp_path / "shown.yaml"
    recorded.write_text(dump_config(loaded.config))
    shown.write_text(show_config(loaded))
    path.unlink()
    assert load_config(recorded).config.model == replace(loaded.config.model, preset="custom")
    assert load_config(shown).config == loaded.config
    assert load_config(None, [f"model={path}", *model_overrides(loaded.config)]).config == loaded.config
    assert model_overrides(load_config(None, ["model=llama-1b"]).config) == []


def test_submitted_job_carries_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.yaml").write_text(commented(SlurmProfile))
    words = [f"model={write(tmp_path)}", "data=synthetic", f"runs_dir={tmp_path}", "global_batch=64"]
    assert main(["train", *words, "--on", f"slurm:{tmp_path}/profile.yaml", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "model.layers=2" in script
    assert "model.ffn_hidden=80" in script


def test_plan_and_editors_accept_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert main(["plan", f"model={path}", "--cluster", "h100:8", "global_batch=64"]) == 0
    assert str(path) in capsys.readouterr().out
    validator = jsonschema.Draft202012Validator(json_schema())
    for model in (str(path), {"preset": "./llama"}):
        validator.validate({"model": model})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"model": {"preset": 3}})


def test_run_resumes_after_the_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepstep.train.trainer import train

    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "mistral", max_position_embeddings=16)
    words = ["data=synthetic", "global_batch=4", "microbatch=4", "schedule=constant", "evaluate.batches=1",
             "observe.tensorboard=false", "compute.threads=1", "compute.device=cpu"]  # fmt: skip
    train(load_config(None, [f"model={path}", *words, "max_duration=2ba"]).config)
    path.unlink()
    train(load_config(Path("runs/run/config.yaml"), ["max_duration=4ba"]).config)
    assert len(losses(Path("runs"))) == 4
    assert sum(record.get("step") == 1 and "loss" in record for record in metrics(Path("runs"))) == 1
