"""Texts the model writes during a run: they are those of its weights, and the run does not notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.config.load import load_config
from keepstep.config.schema import EvaluateConfig, ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.data import tokenization
from keepstep.data.tokenization import SMALLEST_VOCAB, train_bpe
from keepstep.evaluate.chat_model import cached_forward
from keepstep.evaluate.generate import generate
from keepstep.interop.full_model import load_full_model
from keepstep.observe.history import open_history
from keepstep.observe.run_folder import RunFolder
from keepstep.train.telemetry.samples import Prompts
from tests.train.tiny_runs import losses, run_here, run_processes

PROMPTS = ("a few", "")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_bpe(["a few words"], SMALLEST_VOCAB, path)
    return path


def words(tokenizer: Path) -> list[str]:
    named = [f"data.tokenizer={tokenizer}", f"model.vocab={SMALLEST_VOCAB}", "model.dropout=0.1"]
    return [*named, f"evaluate.prompts={json.dumps(PROMPTS)}", "evaluate.prompt_tokens=5", "evaluate.interval=3ba"]


def expected(folder: Path, tokenizer: Path) -> list[tuple[str, str]]:
    """What the run's last checkpoint says."""
    loaded, (model, config, _) = tokenization.load(tokenizer), load_full_model(folder)
    model.eval()
    said = []
    for prompt in PROMPTS:
        ids = loaded.encode(prompt).ids or [0]
        new = generate(cached_forward(model, config.model.seq_len), ids, max_new_tokens=5, temperature=0, eos=0)
        said.append((prompt, loaded.decode(new, skip_special_tokens=False)))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["reproducible=elastic"]])
def test_samples_match_the_weights_and_change_no_loss(tmp_path: Path, tokenizer: Path, settings: list[str]) -> None:
    plain = [word for word in words(tokenizer) if "prompt" not in word]
    run_here(tmp_path, *plain, *settings, "name=plain")
    run_here(tmp_path, *words(tokenizer), *settings)
    assert losses(tmp_path) == losses(tmp_path, "plain")
    last = len(losses(tmp_path))
    samples = open_history(RunFolder(tmp_path / "run")).newest_samples()
    told = [(line["prompt"], line["text"]) for line in reversed(samples) if line["step"] == last]
    assert told == expected(tmp_path / "run", tokenizer)


@pytest.mark.slow
def test_processes_that_share_the_weights_write_samples_together(tmp_path: Path, tokenizer: Path) -> None:
    done = run_processes(tmp_path, 2, *words(tokenizer), "precision=fp32", "data.valid_share=0")
    assert done.returncode == 0, done.stderr
    samples = open_history(RunFolder(tmp_path / "run")).newest_samples()
    assert [line["step"] for line in samples] == [6, 6, 3, 3]
    told = [(line["prompt"], line["text"]) for line in samples[1::-1]]
    assert told == expected(tmp_path / "run", tokenizer)


def test_prompts_that_do_not_fit_are_refused(tokenizer: Path) -> None:
    model = ModelConfig(seq_len=16, vocab=SMALLEST_VOCAB)
    with pytest.raises(ConfigError, match="without a tokenizer") as caught:
        Prompts.of(EvaluateConfig(prompts=PROMPTS), model, None)
    assert "data.tokenizer=" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=r"evaluate\.prompts\[1\] has"):
        Prompts.of(EvaluateConfig(prompts=("a", "x" * 40)), model, tokenizer)
    with pytest.raises(ConfigError, match="fewer than 16 tokens, with ids below 100"):
        Prompts.of(EvaluateConfig(prompts=("\u00ff",)), ModelConfig(seq_len=16, vocab=100), tokenizer)
    assert Prompts.of(EvaluateConfig(), model, None) is None


@pytest.mark.parametrize("split", ["parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2", "precision=fp8"])
def test_prompts_with_pipeline_or_context_are_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.prompts") as caught:
        load_config(None, ["model=llama-1b", 'evaluate.prompts=["a"]', split])
    assert "keepstep chat" in "\n".join(caught.value.lines())
