"""Preference and reinforcement learning on a GPU with default settings: rows of any length, in bf16, deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.train.trainer import train
from tests.train.preference_rows import pairs, rl_words, words
from tests.train.tiny_runs import metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="shows the kernels of a GPU")
SMALL = ["model=smollm-135m", "model.layers=3", "max_duration=4ba", "evaluate.batches=1", "observe.tensorboard=false"]


def losses(root: Path, name: str, *overrides: str) -> list[float]:
    train(load_config(None, [*SMALL, f"runs_dir={root}", f"name={name}", *overrides]).config)
    return [line["loss"] for line in metrics(root, name) if "loss" in line]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_reinforcement_learning_repeats_bit_for_bit(method: str, tmp_path: Path) -> None:
    asked = rl_words(tmp_path / "data", method)
    first = losses(tmp_path, "first", *asked, "rl.beta=0.1")
    assert len(first) == 4
    assert losses(tmp_path, "second", *asked, "rl.beta=0.1") == first
    differences = [line["sampler_difference"] for line in metrics(tmp_path, "first") if "sampler_difference" in line]
    assert max(differences) < 0.1


@pytest.mark.parametrize("softcap", [0, 30])
def test_preference_learning_repeats_bit_for_bit(softcap: int, tmp_path: Path) -> None:
    asked = [*words(tmp_path / "data", pairs()), "preference.method=dpo", f"model.final_logit_softcapping={softcap}"]
    first = losses(tmp_path, "first", *asked)
    assert len(first) == 4
    assert losses(tmp_path, "second", *asked) == first
