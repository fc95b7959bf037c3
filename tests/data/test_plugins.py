"""Rows of plug-ins: sequences follow our order, streams resume from their state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.data.datasets import RowOptions
from keepstep.data.loader import build_loaders
from keepstep.data.plugins.stream import StreamLoader, build_stream_loaders
from keepstep.data.step_feed import StepFeed

SEQ_LEN, VOCAB = 4, 1000


def hundred(seq_len: int, vocab: int, seed: int) -> list[list[int]]:
    return [[row] * (seq_len + 1) for row in range(100)]


class Stream:
    """Row n is all n; its state is n."""

    def __init__(self, seq_len: int, vocab: int, seed: int, end: int = 10**9) -> None:
        self.seq_len, self.end, self.at = seq_len, end, 0

    def __next__(self) -> list[int]:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return [self.at - 1] * (self.seq_len + 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Forgetful(Stream):
    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def stateless(seq_len: int, vocab: int, seed: int) -> Iterator[list[int]]:
    yield [0] * (seq_len + 1)


def short_rows(seq_len: int, vocab: int, seed: int) -> list[list[int]]:
    return [[1] * seq_len]


def large_ids(seq_len: int, vocab: int, seed: int) -> list[list[int]]:
    return [[vocab] * (seq_len + 1)]


def options(name: str, **settings: Any) -> RowOptions:
    return RowOptions(DataConfig(f"{__name__}:{name}", **settings), SEQ_LEN, VOCAB, 7)


def open_stream(name: str = "Stream", **settings: Any) -> StreamLoader:
    loaders = build_stream_loaders(options(name, **settings), None)  # type: ignore[arg-type]
    assert loaders is not None
    assert isinstance(loaders.train, StreamLoader)
    return loaders.train


def numbers(loader: Any, first: int, count: int) -> list[int]:
    return [int(row[0]) for row in loader.rows(first, count).inputs]


def test_sequence_is_shuffled_split_and_blended_like_other_data() -> None:
    config = options("hundred", valid_share=0.1).config
    loaders = build_loaders(config, SEQ_LEN, VOCAB, 7, None)  # type: ignore[arg-type]
    epoch = numbers(loaders.train, 0, 90)
    assert sorted(epoch) == list(range(90))
    assert epoch != sorted(epoch)
    assert loaders.valid is not None
    assert sorted(numbers(loaders.valid, 0, 10)) == list(range(90, 100))
    blend = DataConfig(blend={config.path: 0.5, "synthetic": 0.5}, valid_share=0.0)
    assert build_loaders(blend, SEQ_LEN, VOCAB, 7, None).train.samples_per_epoch > 100  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stream_has_the_same_order_for_any_number_of_ranks(ranks: int) -> None:
    seen = {}
    for rank in range(ranks):
        feed = StepFeed(open_stream(), 0, 8, 2, rank, ranks, prefetch=2)
        for batch in feed.next_step() + feed.next_step():
            seen.update({batch.first_sample + row: int(x[0]) for row, x in enumerate(batch.inputs)})
        feed.close()
    assert seen == {number: number for number in range(16)}


def test_stream_resumes_from_its_state_though_it_has_read_ahead() -> None:
    loader = open_stream()
    for first in range(0, 40, 4):
        loader.rows(first, 2)
    saved = loader.state_at(18)
    assert saved == {"sample": 16, "state": {"at": 16}}
    resumed = open_stream()
    resumed.restore(saved)
    assert numbers(resumed, 18, 3) == [18, 19, 20]


def test_stream_can_read_the_last_step_again_and_forgets_older_ones() -> None:
    loader = open_stream()
    for step in range(6):
        loader.state_at(8 * step)
        assert numbers(loader, 8 * step, 8) == list(range(8 * step, 8 * step + 8))
    assert numbers(loader, 40, 2) == [40, 41]
    assert numbers(loader, 48, 2) == [48, 49]
    assert len(loader._states) <= 4


def test_stream_skips_samples_forward() -> None:
    feed = StepFeed(open_stream(), 0, 4, 4, 0, 1, prefetch=1, skipped=[(4, 4)])
    assert [feed.next_step()[0].first_sample for _ in range(2)] == [0, 8]
    feed.close()


def test_stream_that_ends_is_an_error_with_its_length() -> None:
    loader = open_stream(options={"end": 5})
    assert numbers(loader, 0, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="ended after 5 rows"):
        loader.rows(5, 1)


def test_stream_takes_validation_rows_from_another_path() -> None:
    loaders = build_stream_loaders(options("Stream", valid_path=f"{__name__}:hundred"), None)  # type: ignore[arg-type]
    assert loaders is not None
    assert loaders.valid is not None
    assert np.array_equal(loaders.valid.rows(0, 8).inputs, loaders.valid.rows(0, 8).inputs)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Forgetful", {}, "another row after load_state_dict"),
        ("stateless", {}, "has no state_dict and no load_state_dict"),
        ("Stream", {"strategy": "trunc"}, "whose rows are whole"),
        ("Stream", {"valid_path": f"{__name__}:Stream"}, "is a stream, but these rows must be read by number"),
    ],
)
def test_stream_mistakes_are_found_at_the_start(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_stream(name, **settings)


def test_sequence_mistakes_are_found_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"row of shape \[4\]"):
        build_loaders(options("short_rows").config, SEQ_LEN, VOCAB, 7, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"large_ids holds token 1000, but model\.vocab is 1000"):
        build_loaders(options("large_ids").config, SEQ_LEN, VOCAB, 7, None)  # type: ignore[arg-type]
