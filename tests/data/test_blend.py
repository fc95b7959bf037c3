"""Blends follow their weights at every prefix, as a pure function of the sample index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError
from keepstep.data.formats.megatron import MegatronWriter, token_dtype
from keepstep.data.loader import build_loaders
from keepstep.data.order import Blend, greedy

weights = st.lists(st.floats(0.01, 100).map(lambda weight: round(weight, 2)), min_size=1, max_size=6)


@given(weights=weights)
@settings(max_examples=10)
def test_shares_follow_weights_at_every_prefix(weights: list[float]) -> None:
    blend = Blend(weights)
    shares = np.array(weights) / sum(weights)
    for sample in (1, 10, 1000, blend.period + 7, 10**12):
        assert np.all(
            np.abs(blend.taken(sample) - shares * sample) <= len(weights) + sample * 2 * len(weights) / 65_536
        )
        assert blend.taken(sample).sum() == sample


@given(weights=weights, first=st.integers(0, 10**10), count=st.integers(1, 200))
@settings(max_examples=10)
def test_choices_and_counts_agree_anywhere(weights: list[float], first: int, count: int) -> None:
    blend = Blend(weights)
    chosen = blend.chosen(first, count)
    gained = blend.taken(first + count) - blend.taken(first)
    assert np.array_equal(np.bincount(chosen, minlength=len(weights)), gained)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.5, 0.3, 0.2], "012010201001201020100120"), ([0.7, 0.3], "010010010001001001000100"), ([1, 1, 1], "012" * 8)],
)
def test_the_choice_is_the_one_megatron_core_makes(weights: list[float], expected: str) -> None:
    assert "".join(map(str, greedy(weights, 24).tolist())) == expected
    assert "".join(map(str, Blend(weights).chosen(0, 24).tolist())) == expected


def test_a_blended_loader_takes_each_set_in_its_own_order(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 1000)):
        with MegatronWriter(tmp_path / name, token_dtype(5000)) as writer:
            writer.add(np.arange(first, first + 161))
    paths = {str(tmp_path / "a"): 3.0, str(tmp_path / "b"): 1.0}
    config = DataConfig(blend=paths, valid_share=0.0, shuffle=False)
    train = build_loaders(config, 8, 5000, 1, tmp_path).train
    found = train.rows(0, 24).inputs[:, 0]
    assert found[found < 1000].tolist() == list(range(0, 144, 8))
    assert found[found >= 1000].tolist() == list(range(1000, 1048, 8))
    assert np.array_equal(train.rows(5, 9).inputs, train.rows(0, 24).inputs[5:14])
    assert train.samples_per_epoch == 40


def test_weights_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="each must be above 0"):
        Blend([1.0, -1.0])
