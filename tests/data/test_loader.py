"""Batches: exact, the same for any number of ranks, resumable at any sample, with errors where they are seen."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError, NothingToReadError
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Rows, SyntheticRows, to_batch
from keepstep.data.formats.megatron import HEADER, MegatronReader, MegatronWriter, token_dtype
from keepstep.data.loader import BlendedLoader, Loader, build_loaders, changed_order
from keepstep.data.order import Blend, IndexArray
from keepstep.data.packing import PackedRows
from keepstep.data.step_feed import StepFeed, WaitCancelledError
from tests.patience import PATIENCE_S


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    with MegatronWriter(tmp_path / "set", token_dtype(1000)) as writer:
        for length in generator.integers(1, 60, size=200):
            writer.add(generator.integers(0, 1000, size=int(length)))
    return tmp_path / "set"


def whole(prefix: Path, seq_len: int = 16, *, bounds: bool = False) -> Loader:
    reader = MegatronReader(prefix)
    return Loader(PackedRows([reader], [range(reader.documents)], seq_len, 1000, bounds=bounds), seed=7, shuffle=True)


def test_rows_are_windows_of_the_stream_and_targets_are_one_ahead(prefix: Path) -> None:
    config = DataConfig(path=str(prefix), shuffle=False, valid_share=0.0)
    loaders = build_loaders(config, 16, 1000, 1, prefix.parent)
    stream = MegatronReader(prefix).tokens
    batch = loaders.train.rows(2, 3)
    assert np.array_equal(batch.inputs.ravel(), stream[32:80])
    assert np.array_equal(batch.targets.ravel(), stream[33:81])
    assert loaders.valid is None


@given(
    worlds=st.lists(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 2), (4, 1), (3, 2), (12, 1)]), min_size=1, max_size=5),
    steps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
@settings(max_examples=25)
@pytest.mark.slow
def test_no_sample_is_lost_or_doubled_over_resizes(worlds: list[tuple[int, int]], steps: list[int]) -> None:
    loader = Loader(_Numbers(50), seed=3, shuffle=True)
    seen: list[int] = []
    at = 0
    for (ranks, microbatch), count in zip(worlds, steps, strict=False):
        feeds = [StepFeed(loader, at, 12, microbatch, rank, ranks, prefetch=2) for rank in range(ranks)]
        for _ in range(count):
            found = [batch for feed in feeds for batch in feed.next_step()]
            found.sort(key=lambda batch: batch.first_sample)
            seen += [int(number) for batch in found for number in batch.inputs[:, 0]]
        at = feeds[0].position
        for feed in feeds:
            feed.close()
    assert at == len(seen)
    assert seen == loader.rows(0, len(seen)).inputs[:, 0].tolist()
    for epoch in range(len(seen) // 50):
        assert sorted(seen[50 * epoch : 50 * epoch + 50]) == list(range(50))


class _Numbers:
    """Row i holds the number i."""

    def __init__(self, count: int, broken_at: int = -1) -> None:
        self.count = count
        self.broken_at = broken_at

    def read(self, indices: IndexArray) -> Rows:
        if self.broken_at in indices.tolist():
            raise DataError("shard 3 is damaged", "fetch it again")
        return Rows(np.repeat(indices[:, None], 3, axis=1))


def test_an_error_while_reading_ahead_reaches_the_consumer_every_time() -> None:
    feed = StepFeed(Loader(_Numbers(50, broken_at=4), seed=0, shuffle=False), 0, 2, 1, 0, 1, prefetch=8)
    assert [batch.first_sample for batch in feed.next_step() + feed.next_step()] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(DataError, match="shard 3"):
            feed.next_step()
    feed.close()


def test_closing_ends_the_thread_even_when_nothing_was_read() -> None:
    before = set(threading.enumerate())
    feed = StepFeed(Loader(_Numbers(50), seed=0, shuffle=True), 0, 4, 2, 0, 1, prefetch=1)
    feed.close()
    feed.close()
    assert set(threading.enumerate()) <= before


class _Stuck(_Numbers):
    """A store that is away: reading behind row `free` waits until it is let go."""

    def __init__(self, count: int, free: int) -> None:
        super().__init__(count)
        self.free = free
        self.is_waiting, self.let_go = threading.Event(), threading.Event()

    def read(self, indices: np.ndarray) -> Rows:
        if int(indices.max()) >= self.free and not self.let_go.is_set():
            self.is_waiting.set()
            self.let_go.wait(PATIENCE_S)
        return super().read(indices)


@pytest.mark.slow
def test_closing_and_going_back_do_not_wait_for_a_store_that_is_away() -> None:
    source = _Stuck(50, free=8)
    feed = StepFeed(Loader(source, seed=0, shuffle=False), 0, 4, 4, 0, 1, prefetch=8)
    expected = [feed.next_step()[0].inputs, feed.next_step()[0].inputs]
    assert source.is_waiting.wait(PATIENCE_S)
    feed.rewind(4, ())
    assert np.array_equal(feed.next_step()[0].inputs, expected[1])
    feed.close()
    assert not source.let_go.is_set()
    feed.rewind(0, ())
    source.let_go.set()
    assert np.array_equal(feed.next_step()[0].inputs, expected[0]), "what the old thread still read is nobody's"
    feed.close()


def test_whoever_waits_for_data_says_so_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.data.step_feed._WAIT_NOTICE_S", 0.01)
    source = _Stuck(50, free=0)
    feed = StepFeed(Loader(source, seed=0, shuffle=False), 0, 4, 4, 0, 1, prefetch=1)
    said = 0

    def waiting() -> None:
        nonlocal said
        said += 1
        if said == 3:
            source.let_go.set()

    assert feed.next_step(waiting)[0].first_sample == 0
    assert said >= 3
    feed.close()


def test_a_blend_keeps_documents_apart_though_one_set_knows_none(prefix: Path, tmp_path: Path) -> None:
    config = DataConfig(blend={str(prefix): 1, "synthetic": 1}, separate_documents=True, valid_share=0.0)
    blended = build_loaders(config, 16, 1000, 7, tmp_path).train.rows(0, 40)
    alone = build_loaders(replace(config, path=str(prefix), blend={}), 16, 1000, 7, tmp_path).train.rows(0, 20)
    assert blended.documents is not None
    assert blended.positions is not None
    assert alone.documents is not None
    own = Blend([1, 1]).chosen(0, 40) == 0
    for name in ("inputs", "targets", "documents", "positions"):
        assert np.array_equal(getattr(blended, name)[own], getattr(alone, name))
    assert not blended.documents[~own].any()
    assert np.array_equal(blended.positions[~own], np.tile(np.arange(16), (20, 1)))


def test_raw_text_without_its_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    config = DataConfig(path=str(tmp_path / "x.txt"), tokenizer=str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"data\.tokenizer is .*none\.json', which is missing"):
        build_loaders(config, 16, 1000, 7, tmp_path)


@pytest.mark.parametrize("name", ["valid_path", "test_path"])
@pytest.mark.parametrize("path", ["none", "none.jsonl"])
def test_held_out_data_that_is_not_there_is_told_by_its_own_name(
    name: str, path: str, prefix: Path, tmp_path: Path
) -> None:
    config = replace(DataConfig(path=str(prefix)), **{name: path})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"^data\.{name} (is|names) "):
        build_loaders(config, 16, 1000, 7, tmp_path)


def gpt_loader(folder: Path, documents: list[list[int]], **changes: Any) -> Loader:
    with MegatronWriter(folder / "x", np.dtype("<i4")) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int32))
    seed = changes.pop("seed", 3)
    config = DataConfig(path=str(folder / "x"), order="gpt", valid_share=0.0, **changes)
    return build_loaders(config, 16, 1000, seed, folder).train


def test_the_order_of_megatron_keeps_attention_inside_documents_where_that_is_asked_for(tmp_path: Path) -> None:
    documents = [[number] * (3 + number) for number in range(40)]
    plain = gpt_loader(tmp_path, documents)
    apart = gpt_loader(tmp_path, documents, separate_documents=True)
    count = plain.samples_per_epoch
    before, batch = plain.rows(0, count), apart.rows(0, count)
    assert before.documents is None
    assert np.array_equal(batch.inputs, before.inputs)
    assert batch.documents is not None
    assert batch.positions is not None
    # A document here is one number again and again, and no two neighbours are the same one.
    starts = np.diff(batch.inputs, axis=1) != 0
    assert np.array_equal(np.diff(batch.documents, axis=1) != 0, starts)
    assert np.array_equal(batch.positions[:, 1:] == 0, starts)
    crossed = before.targets != before.inputs
    assert np.array_equal(batch.targets == IGNORE_INDEX, crossed)


@pytest.mark.parametrize("token", [-7, 1000])
def test_the_order_of_megatron_refuses_tokens_that_the_model_has_no_row_for(token: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"holds token {token}, but model.vocab is 1000"):
        gpt_loader(tmp_path, [[1, 2, 3, token] * 30]).rows(0, 4)


def test_another_seed_or_number_of_samples_is_another_order_of_megatron(tmp_path: Path) -> None:
    documents = [[number] * 20 for number in range(40)]
    facts = gpt_loader(tmp_path, documents).order_facts
    assert json.loads(json.dumps(facts)) == facts
    assert changed_order(facts, gpt_loader(tmp_path, documents, seed=4).order_facts) == "seed 3 then, 4 now"
    more = gpt_loader(tmp_path, documents, gpt_samples=40).order_facts
    assert changed_order(facts, more) == "gpt_samples 49 then, 40 now"


def test_a_negative_length_in_an_index_is_damage_to_the_order_of_megatron(tmp_path: Path) -> None:
    gpt_loader(tmp_path, [[1] * 50, [2] * 50, [3] * 50])
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    raw[HEADER.size + 4 : HEADER.size + 8] = np.int32(-9).tobytes()
    (tmp_path / "x.idx").write_bytes(raw)
    config = DataConfig(path=str(tmp_path / "x"), order="gpt", valid_share=0.0)
    with pytest.raises(DataError, match="negative length"):
        build_loaders(config, 16, 1000, 3, tmp_path)


def test_waiting_for_data_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.data.step_feed._WAIT_NOTICE_S", 0.01)
    source = _Stuck(50, free=0)
    feed = StepFeed(Loader(source, seed=0, shuffle=False), 0, 4, 4, 0, 1, prefetch=1)
    with pytest.raises(WaitCancelledError):
        feed.next_step(cancelled=lambda: True)
    assert feed.position == 0
    source.let_go.set()
    assert feed.next_step()[0].first_sample == 0
    feed.close()


def test_what_decides_the_order_is_told_in_words() -> None:
    def facts(*weights: float, rows: int = 50, seed: int = 1) -> dict[str, Any]:
        parts = [Loader(_Numbers(count), seed=seed, shuffle=True) for count in (40, rows)]
        return json.loads(json.dumps(BlendedLoader(parts, weights).order_facts))  # type: ignore[no-any-return]

    assert facts(0.7, 0.3) == facts(7, 3)
    assert changed_order(facts(0.7, 0.3), facts(0.5, 0.5)) == "weights [7, 3] then, [1, 1] now"
    assert changed_order(facts(1, 1), facts(1, 1, rows=60)) == "data set 2: rows 50 then, 60 now"
    assert changed_order(facts(1, 1), facts(1, 1, seed=2)) == "data set 1: seed 1 then, 2 now"


def test_validation_files_of_their_own_are_read_once_in_a_blend(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100), ("valid", 200)):
        with MegatronWriter(tmp_path / name, token_dtype(1000)) as writer:
            writer.add(np.arange(first, first + 33))
    valid = str(tmp_path / "valid")
    config = DataConfig(
        blend={str(tmp_path / "a"): 3, str(tmp_path / "b"): 1}, valid_path=valid, test_path=valid, valid_share=0.0
    )
    loaders = build_loaders(config, 8, 1000, 1, tmp_path)
    for loader in (loaders.valid, loaders.test):
        assert loader is not None
        assert sorted(loader.rows(0, loader.samples_per_epoch).inputs[:, 0].tolist()) == [200, 208, 216, 224]


def test_positions_are_those_of_the_rows_that_were_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with MegatronWriter(tmp_path / name, token_dtype(1000)) as writer:
            writer.add(np.full(8 * 10 + 1, 1 if name == "a" else 2))
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    loaders = build_loaders(DataConfig(blend={first: 0.7, second: 0.3}, valid_share=0.0), 8, 1000, 1, tmp_path)
    for samples in (1, 7, 23):
        read = loaders.train.rows(0, samples).inputs[:, 0]
        counts = {path: int((read == token).sum()) for path, token in ((first, 1), (second, 2))}
        assert loaders.positions(samples) == {path: {"samples": n, "epoch": n / 10} for path, n in counts.items()}


def test_a_global_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of microbatch"):
        StepFeed(Loader(_Numbers(50), seed=0, shuffle=True), 0, 10, 2, 0, 2, prefetch=1)


def test_held_out_documents_are_never_trained_on(prefix: Path) -> None:
    loaders = build_loaders(DataConfig(path=str(prefix), valid_share=0.2, shuffle=False), 8, 1000, 1, prefix.parent)
    reader = MegatronReader(prefix)
    split = reader.document_start(160)
    assert loaders.valid is not None
    assert loaders.train.samples_per_epoch == (split - 1) // 8
    every_row = loaders.valid.rows(0, loaders.valid.samples_per_epoch).inputs
    assert reader.tokens[split : split + 8].tolist() in every_row.tolist()


def test_row_with_a_token_beyond_the_vocabulary_is_refused(prefix: Path) -> None:
    reader = MegatronReader(prefix)
    rows = PackedRows([reader], [range(reader.documents)], 64, 500, bounds=False)
    with pytest.raises(NothingToReadError, match=r"holds token \d+, but model\.vocab is 500") as caught:
        rows.read(np.arange(50))
    assert "model.vocab" in (caught.value.hint or "")


def test_documents_and_positions_keep_documents_apart(prefix: Path) -> None:
    reader = MegatronReader(prefix)
    batch = whole(prefix, bounds=True).rows(0, 40)
    assert batch.documents is not None
    assert batch.positions is not None
    starts = set(reader.starts_between(0, len(reader.tokens)).tolist())
    plain = whole(prefix).rows(0, 40)
    order = np.array([_place(reader, row) for row in plain.inputs])
    for row, begin in enumerate(order.tolist()):
        for place in range(1, 16):
            begins = begin + place in starts
            assert (batch.documents[row, place] != batch.documents[row, place - 1]) == begins
            assert (batch.positions[row, place] == 0) == begins
            assert (batch.targets[row, place - 1] == -100) == begins


def _place(reader: MegatronReader, row: np.ndarray) -> int:
    windows = np.lib.stride_tricks.sliding_window_view(reader.tokens, 16)[::16]
    return 16 * int(np.flatnonzero((windows == row).all(axis=1))[0])


def test_a_folder_of_several_files_is_one_data_set(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        with MegatronWriter(tmp_path / name, token_dtype(1000)) as writer:
            writer.add(np.arange(first, first + 33))
    loaders = build_loaders(DataConfig(path=str(tmp_path), valid_share=0.0, shuffle=False), 8, 1000, 1, tmp_path)
    assert loaders.train.rows(0, 8).inputs[:, 0].tolist() == [0, 8, 16, 24, 100, 108, 116, 124]


def test_a_single_document_that_is_held_out_is_told_from_too_little_data(tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "book", token_dtype(1000)) as writer:
        writer.add(np.arange(900))
    with pytest.raises(DataError, match="hold out all of it"):
        build_loaders(DataConfig(path=str(tmp_path / "book"), valid_share=0.01), 8, 1000, 1, tmp_path)
    alone = build_loaders(DataConfig(path=str(tmp_path / "book"), valid_share=0.0), 8, 1000, 1, tmp_path)
    assert alone.train.samples_per_epoch == 112


def test_nothing_at_the_path_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data is there"):
        build_loaders(DataConfig(path=str(tmp_path / "none")), 8, 1000, 1, tmp_path)


def test_synthetic_rows_follow_from_seed_and_number_alone() -> None:
    rows, again = SyntheticRows(64, 5000, 3), SyntheticRows(64, 5000, 3)
    numbers = np.array([5, 10**9, 5])
    found = rows.read(numbers).tokens
    assert np.array_equal(found, again.read(numbers).tokens)
    assert np.array_equal(found[0], found[2])
    steps = np.diff(found) % 4096
    assert np.mean(steps == np.bincount(steps.ravel()).argmax()) > 0.8
    assert not np.array_equal(found, SyntheticRows(64, 5000, 4).read(numbers).tokens)


def test_batches_without_documents_share_one_array() -> None:
    batch = to_batch(Rows(np.arange(12).reshape(2, 6)), 0)
    assert np.shares_memory(batch.inputs, batch.targets)


def test_importing_the_loader_is_light() -> None:
    code = "import sys, keepstep.data.loader; print(sorted({'torch', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
