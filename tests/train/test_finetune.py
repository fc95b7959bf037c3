"""Fine-tuning goes through the one loop: adapters, weights to start from, best weights, early stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.cli.main import main
from keepstep.cli.train import add_finetune, finetune_words
from keepstep.config.dump import dump_config
from keepstep.config.hf_config import hf_config_of
from keepstep.config.load import load_config
from keepstep.config.schema import CheckpointConfig, EvaluateConfig, FinetuneConfig, ModelConfig, RunConfig
from keepstep.core.errors import ConfigError, DataError, UsageError
from keepstep.interop.full_model import load_full_model, load_initial_model
from keepstep.interop.hf_folder import save_hf
from keepstep.interop.run_data import open_run_data
from keepstep.interop.run_source import BEST_FOLDER, adopt_initial_shape, read_run_config
from keepstep.interop.safetensors_files import fingerprint, write_shards
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer, add_embedding_noise
from keepstep.train.recovery.best_weights import BestWeights
from keepstep.train.trainer import train
from tests.train.tiny_runs import TINY, losses, metrics, run_here, run_processes

LORA = ["lora.rank=2", "lora.targets=[q, v, up, down]"]


def finetune_here(root: Path, *overrides: str) -> None:
    short = [word for word in TINY if not word.startswith("model.")]
    train(adopt_initial_shape(load_config(None, [*short, f"runs_dir={root}", "model.seq_len=16", *overrides])))


@pytest.mark.slow
def test_adapters_resume_with_equal_losses(tmp_path: Path) -> None:
    run_here(tmp_path, *LORA, "name=one", "max_duration=12ba")
    done = run_processes(tmp_path, 2, *LORA, "name=two", "max_duration=12ba")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-4)
    run_here(tmp_path, *LORA, "name=cut", "max_duration=12ba", "checkpoint.interval=5ba", "checkpoint.at_end=false")
    run_here(tmp_path, *LORA, "name=cut", "max_duration=12ba")
    assert losses(tmp_path, "cut") == losses(tmp_path, "one")
    assert losses(tmp_path, "one")[-1] < losses(tmp_path, "one")[0]


@pytest.mark.slow
def test_adapters_keep_their_base_weights(tmp_path: Path) -> None:
    run_here(tmp_path, "name=base")
    start = [f"finetune.start_from={tmp_path}/base", *LORA]
    finetune_here(tmp_path, *start, "name=whole", "max_duration=8ba")
    finetune_here(
        tmp_path, *start, "name=cut", "max_duration=8ba", "checkpoint.interval=5ba", "checkpoint.at_end=false"
    )
    tokens_bt = torch.arange(12)[None]
    merged, began = (opened(tmp_path / "whole")[0](tokens_bt) for opened in (load_full_model, load_initial_model))

    run_here(tmp_path, "name=base", "max_duration=9ba")
    assert torch.equal(load_full_model(tmp_path / "whole")[0](tokens_bt), merged)
    assert torch.equal(load_initial_model(tmp_path / "whole")[0](tokens_bt), began)
    finetune_here(tmp_path, *start, "name=cut", "max_duration=8ba")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")

    run_here(tmp_path, "name=base", "max_duration=12ba", "checkpoint.keep=1")
    with pytest.raises(ConfigError, match=r"does not hold the weights any more .* step 6 is gone"):
        load_full_model(tmp_path / "whole")
    with pytest.raises(ConfigError, match="does not hold the weights any more"):
        finetune_here(tmp_path, *start, "name=whole", "max_duration=10ba")


@pytest.mark.slow
def test_adapters_are_not_merged_into_other_hugging_face_weights(tmp_path: Path) -> None:
    shape = ModelConfig(layers=2, hidden=32, heads=4, vocab=128, seq_len=16)
    for name, seed in (("hf", 1), ("other", 2)):
        model = Transformer(shape)
        init_weights(model, seed)
        save_hf(dict(model.named_parameters()), shape, hf_config_of(shape, "float32"), tmp_path / name, torch.float32)
    finetune_here(tmp_path, f"finetune.start_from={tmp_path}/hf", *LORA, "name=tuned", "evaluate.keep_best=true")
    assert (tmp_path / "tuned" / BEST_FOLDER).is_dir()
    load_full_model(tmp_path / "tuned")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError, match="does not hold the weights any more"):
        load_full_model(tmp_path / "tuned")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["hf", "base"])
@pytest.mark.parametrize("words", [[], LORA], ids=["whole", "lora"])
def test_pipeline_stages_start_from_the_same_weights(start: str, words: list[str], tmp_path: Path) -> None:
    if start == "hf":
        shape = ModelConfig(layers=2, hidden=32, heads=4, vocab=128, seq_len=16)
        model = Transformer(shape)
        init_weights(model, 1)
        save_hf(dict(model.named_parameters()), shape, hf_config_of(shape, "float32"), tmp_path / "hf", torch.float32)
    else:
        run_here(tmp_path, "name=base")
    words = [*words, f"finetune.start_from={tmp_path}/{start}", "max_duration=3ba"]
    finetune_here(tmp_path, *words, "name=one")
    done = run_processes(tmp_path, 2, *words, "parallel.pipeline=2", "name=two")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-4)


def test_adopted_shape_is_checked(tmp_path: Path) -> None:
    shape = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, vocab=128, seq_len=16, norm="rmsnorm", bias=False)
    shape = replace(shape, positions="rotary", activation="swiglu", tied=False)
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(shape, "float32")))
    words = [f"finetune.start_from={tmp_path}", "model.seq_len=16"]
    assert adopt_initial_shape(load_config(None, [*words, "parallel.tensor=2"])).model.kv_heads == 2
    with pytest.raises(ConfigError, match=r"parallel\.tensor is 4, but it must divide model\.kv_heads \(2\)"):
        adopt_initial_shape(load_config(None, [*words, "parallel.tensor=4"]))
    # The default shape has 12 heads, which 8 does not divide: that is nobody's shape here.
    wide = replace(shape, heads=8, kv_heads=8)
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(wide, "float32")))
    assert adopt_initial_shape(load_config(None, [*words, "parallel.tensor=8"])).parallel.tensor == 8


def test_a_fingerprint_tells_weights_apart_and_not_files(tmp_path: Path) -> None:
    tensors = {f"t{number}.weight": torch.full((10, 10), float(number)) for number in range(5)}
    for folder, bytes_each in (("one", 10_000), ("many", 900)):
        (tmp_path / folder).mkdir()
        write_shards(tensors.items(), tmp_path / folder, largest_bytes=bytes_each)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "many")
    tensors["t3.weight"][9, 9] = 0.0
    (tmp_path / "changed").mkdir()
    write_shards(tensors.items(), tmp_path / "changed")
    assert fingerprint(tmp_path / "changed") != fingerprint(tmp_path / "one")


@pytest.mark.slow
def test_lora_checkpoint_holds_adapters_only(tmp_path: Path) -> None:
    run_here(tmp_path, "name=base")
    finetune_here(tmp_path, f"finetune.start_from={tmp_path}/base", *LORA, "name=tuned", "max_duration=8ba")
    saved = Checkpointer(tmp_path / "tuned" / "checkpoints", CheckpointConfig())
    adapted, config, _ = load_full_model(tmp_path / "tuned", merge=False)
    adapters = {name: item for name, item in adapted.named_parameters() if item.requires_grad}
    assert all(name.endswith(("lora_a", "lora_b")) for name in adapters)
    assert saved.load_newest({"model": adapters}) is not None, "exactly the adapters are there, or loading refuses"

    base, _, _ = load_full_model(tmp_path / "base")
    began, _, _ = load_initial_model(tmp_path / "tuned")
    merged, _, step = load_full_model(tmp_path / "tuned")
    assert step == 8
    tokens_bt = torch.randint(0, config.model.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(base(tokens_bt), began(tokens_bt))
    assert (merged(tokens_bt) - base(tokens_bt)).abs().max() > 1e-3
    torch.testing.assert_close(merged(tokens_bt), adapted(tokens_bt), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_full_finetuning_starts_from_named_weights(tmp_path: Path) -> None:
    run_here(tmp_path, "name=base", "max_duration=40ba")
    finetune_here(tmp_path, f"finetune.start_from={tmp_path}/base", "name=tuned", "max_duration=3ba")
    assert read_run_config(tmp_path / "tuned").model.layers == 2
    assert losses(tmp_path, "tuned")[0] == pytest.approx(losses(tmp_path, "base")[-1], abs=0.3)
    assert losses(tmp_path, "tuned")[0] < losses(tmp_path, "base")[0] - 1


@pytest.mark.slow
def test_two_processes_import_what_one_process_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
             "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(tmp_path / "hf")
    for processes in ("1", "2"):
        words = ["import", str(tmp_path / "hf"), "--name", f"by-{processes}", "--runs-dir", str(tmp_path)]
        assert main([*words, "--procs", processes]) == 0
    one, two = (load_full_model(tmp_path / f"by-{processes}")[0].state_dict() for processes in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert main([*words, "--procs", "1"]) == 2, "a run that is there is never written over"


@pytest.mark.slow
@pytest.mark.parametrize("again", [["evaluate.keep_best=true"], []])
def test_new_run_moves_old_best_weights_away(again: list[str], tmp_path: Path) -> None:
    run_here(tmp_path, "evaluate.keep_best=true", "max_duration=12ba")
    run_here(tmp_path, *again, "seed=99", "checkpoint.autoresume=false", "optimizer.lr=1e-4", "max_duration=4ba")
    model, config, step = load_full_model(tmp_path / "run")
    assert (step, config.seed) == (4, 99)
    newest = {name: torch.empty_like(item) for name, item in model.named_parameters()}
    Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig()).load_newest({"model": newest})
    assert all(torch.equal(item, newest[name]) for name, item in model.named_parameters())
    assert Checkpointer(tmp_path / "run" / "best.old", CheckpointConfig()).find() is not None, "nothing is lost"


def test_best_weights_are_saved_and_patience_runs_out(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    best = BestWeights(tmp_path / "best", EvaluateConfig(keep_best=True, patience=2))
    for step, loss in enumerate([3.0, 2.0, 2.5], start=1):
        weight.fill_(step)
        assert best.offer(step, loss, lambda: {"weight": weight}) == (step < 3)
    assert not best.out_of_patience
    resumed = BestWeights(tmp_path / "best", EvaluateConfig(keep_best=True, patience=2))
    assert not resumed.offer(4, 2.2, lambda: {"weight": weight})
    assert not resumed.offer(5, 2.1, lambda: {"weight": weight})
    assert resumed.out_of_patience
    kept = torch.zeros(3)
    Checkpointer(tmp_path / "best", CheckpointConfig()).load_newest({"model": {"weight": kept}})
    assert kept.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.slow
def test_a_run_that_no_longer_improves_stops_early(tmp_path: Path) -> None:
    run_here(tmp_path, "max_duration=40ba", "optimizer.lr=1e-9", "evaluate.interval=2ba", "evaluate.patience=2")
    assert metrics(tmp_path)[-1]["step"] < 40


def test_neftune_noise_is_bounded_and_training_only() -> None:
    config = load_config(None, TINY).config.model
    model = Transformer(config)
    tokens_bt = torch.randint(0, 128, (2, 16))
    plain = model.embed(tokens_bt)
    add_embedding_noise(model, 5.0)
    noise = model.train().embed(tokens_bt) - plain
    assert 0 < noise.abs().max() <= 5.0 / (16 * 32) ** 0.5 + 1e-6
    assert torch.equal(model.eval().embed(tokens_bt), plain)


def test_flags_become_the_words_of_train(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_finetune(parser)
    args = parser.parse_args(
        ["--from", "hf", "--data", "rows.jsonl", "--lora", "8", "--base", "nf4", "--epochs", "2", "seed=4"]
    )
    words = finetune_words(args)
    config = load_config(None, words).config
    assert config.lora.base == "nf4"
    assert (config.finetune.start_from, config.data.path, config.lora.rank, config.seed) == ("hf", "rows.jsonl", 8, 4)
    assert (str(config.max_duration), config.optimizer.lr, config.evaluate.keep_best) == ("2ep", 2e-4, True)
    # A share of the data, whatever its size; a length in steps says nothing about the data.
    assert str(config.schedule.warmup) == "0.1ep"
    chooses = parser.parse_args(["--from", "hf", "--data", "rows.jsonl", "--lora", "8", "preference.method=dpo"])
    assert load_config(None, finetune_words(chooses)).config.optimizer.lr == 1e-5
    unranked = parser.parse_args(["--from", "hf", "--data", "rows.jsonl", "--lora"])
    assert load_config(None, finetune_words(unranked)).config.lora.rank == 16
    counted = parser.parse_args(["--from", "hf", "--data", "rows.jsonl", "max_duration=500ba"])
    assert str(load_config(None, finetune_words(counted)).config.schedule.warmup) == "20ba"


def test_a_setting_is_not_taken_for_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    from keepstep.cli.main import main

    assert main(["finetune", "--from", "hf", "--lora", "lora.alpha=32"]) == 2
    assert "write --lora 16 lora.alpha=32" in capsys.readouterr().err
    assert main(["finetune", "--from", "hf", "--lora", "eight"]) == 2
    assert "write a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    ["[de] rows.jsonl", "{a}.jsonl", "'quoted'.jsonl", "${HOME}.jsonl", "12", "null", " rows\n.jsonl ", "a=b, c: d#"],
)
def test_a_flag_means_its_own_letters(path: str) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_finetune(parser)
    config = load_config(None, finetune_words(parser.parse_args(["--from", path, "--data", path]))).config
    assert (config.finetune.start_from, config.data.path) == (path, path)


def test_dry_run_prints_only_what_would_be_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from keepstep.launch.profile_kinds import SlurmProfile
    from keepstep.launch.profiles import commented

    (tmp_path / "profile.yaml").write_text(commented(SlurmProfile))
    where = ["--on", f"slurm:{tmp_path}/profile.yaml", "--dry-run"]
    words = ["data.path=toolcalls", "model.preset=mpt-tiny", f"runs_dir={tmp_path}", "name=tuned", "max_duration=2ba"]
    answers = []
    for verb in ("train", "finetune"):
        assert main([verb, *words, "global_batch=64", *where]) == 0
        answers.append(capsys.readouterr().out.splitlines())
    assert answers[1][-1] == answers[0][-1] == 'exit "$code"'


def test_starting_from_nothing_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run's folder nor a Hugging Face model"):
        adopt_initial_shape(load_config(None, [f"finetune.start_from={tmp_path}"]))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError) as caught:
        adopt_initial_shape(load_config(None, [f"finetune.start_from={tmp_path}/model.gguf"]))
    assert caught.value.hint == f"keepstep import {tmp_path}/model.gguf"


def test_finetune_needs_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--from", str(tmp_path), f"runs_dir={tmp_path}"]) == 2
    assert "finetune needs conversations" in capsys.readouterr().err
    assert main(["finetune", "--data", "toolcalls", f"runs_dir={tmp_path}"]) == 2
    assert "finetune needs a model to start from" in capsys.readouterr().err


@pytest.mark.slow
def test_start_is_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(Path("runs"), "name=base", "seed=1", "checkpoint.folder=steps")
    finetune_here(Path("runs"), "finetune.start_from=runs/base", *LORA, "name=tuned", "max_duration=2ba")
    tokens_bt = torch.arange(12)[None]
    expected = load_full_model(Path("runs/tuned"))[0](tokens_bt)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert torch.equal(load_full_model(tmp_path / "runs" / "tuned")[0](tokens_bt), expected)
    # Another run of the same name lies here, of the same shape: it is not the one that was meant.
    run_here(Path("runs"), "name=base", "seed=2", "checkpoint.folder=steps")
    assert torch.equal(load_full_model(tmp_path / "runs" / "tuned")[0](tokens_bt), expected)
    assert torch.equal(load_full_model(Path("../runs/tuned"))[0](tokens_bt), expected)


@pytest.mark.parametrize("linked", ["runs", "deeper/runs"])
def test_start_is_found_next_to_a_linked_run_folder(
    linked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, scratch, elsewhere = (tmp_path / name for name in ("project", "scratch/runs", "elsewhere"))
    for folder in (project / "deeper", scratch / "tuned", elsewhere):
        folder.mkdir(parents=True)
    (project / linked).symlink_to(scratch)
    config = replace(RunConfig(), name="tuned", runs_dir=linked, finetune=FinetuneConfig(start_from="base"))
    (scratch / "tuned" / "config.yaml").write_text(dump_config(config))

    def start_from(where: Path) -> Path:
        return Path(read_run_config(where).finetune.start_from).absolute()

    monkeypatch.chdir(project)
    assert start_from(Path(linked, "tuned")) == project / "base"
    # Told by its own name, it is known as what the link here leads to.
    assert start_from(scratch / "tuned") == project / "base"
    monkeypatch.chdir(elsewhere)
    assert start_from(project / linked / "tuned") == project / "base"
    assert start_from(Path("..", "project", linked, "tuned")) == project / "base"


@pytest.mark.slow
def test_a_warmup_that_outlasts_the_run_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_here(tmp_path, "max_duration=2ba", "schedule.warmup=20ba")
    assert "schedule.warmup (20ba) is longer than the run (2ba): the learning rate ends at 10%" in caplog.text
    caplog.clear()
    run_here(tmp_path, "name=other", "max_duration=2ba", "schedule.warmup=2ba")
    assert "schedule.warmup" not in caplog.text


def test_blend_of_chat_sets_is_refused(tmp_path: Path) -> None:
    rows, text = tmp_path / "rows.jsonl", tmp_path / "text.jsonl"
    said = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    rows.write_text(json.dumps(said) + "\n")
    text.write_text(json.dumps({"prompt": "why", "text": "because"}) + "\n")
    for words in (f"data.blend={{'{text}': 1, '{rows}': 1}}", f"data.path={text},{rows}", "data.blend={toolcalls: 1}"):
        with pytest.raises(DataError, match="holds conversations"):
            open_run_data(load_config(None, [*TINY, f"runs_dir={tmp_path}", words]).config)
    with pytest.raises(ConfigError, match=r"is raw text .* data\.tokenizer"):
        open_run_data(load_config(None, [*TINY, f"runs_dir={tmp_path}", f"data.blend={{'{text}': 1}}"]).config)


@pytest.mark.slow
def test_missing_data_ends_the_first_command(tmp_path: Path) -> None:
    done = run_processes(tmp_path, 1, "data.path=typo", "name=typo")
    assert done.returncode == 4
    assert done.stderr.count("no data is there") == 1, done.stderr
    assert "going on" not in done.stderr
    done = run_processes(tmp_path, 1, "data.path=typo.jsonl", "name=typo")
    assert "typo.jsonl, which does not exist" in done.stderr


def test_start_from_a_name_on_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 128, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[str] = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keepstep.interop.run_source.fetch_source", download)
    adopted = adopt_initial_shape(load_config(None, ["finetune.start_from=OWNER/NAME"]))
    assert asked == ["OWNER/NAME"]
    assert adopted.finetune.start_from == str(tmp_path)
    assert adopted.model.hidden == 64
