"""MDS: what is written is read, and a hostile index or shard is an error, never a crash or a huge allocation."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data.formats import mds_reader, mds_writer
from keepstep.data.loader import build_loaders

quiet = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, rows: int = 9, width: int = 16, name: str = "shard") -> Path:
    writer = mds_writer.TokenShardWriter(folder, name, np.dtype("<i4"))
    writer.add_rows(np.arange(rows * width).reshape(rows, width))
    writer.flush()
    mds_writer.write_index(folder, writer.entries)
    return folder


def read_all(folder: Path) -> list[list[int]]:
    found = []
    for entry in mds_reader.parse_index((folder / "index.json").read_bytes(), "index.json"):
        shard = mds_reader.TokenShard(folder / entry.basename, entry, "tokens")
        found += [shard.tokens(sample).tolist() for sample in range(min(entry.samples, 50))]
        shard.lengths()
    return found


def test_rows_come_back_over_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds_writer, "SIZE_LIMIT", 700)
    write(tmp_path, rows=50)
    assert len(list(tmp_path.glob("*.mds"))) > 4
    assert all(path.stat().st_size <= 700 for path in tmp_path.glob("*.mds"))
    assert read_all(tmp_path) == np.arange(800).reshape(50, 16).tolist()


@pytest.mark.parametrize(("seq_len", "rows"), [(16, 9), (15, 9), (8, 17), (40, 3)])
def test_any_row_length_can_be_read_from_joined_samples(tmp_path: Path, seq_len: int, rows: int) -> None:
    config = DataConfig(path=str(write(tmp_path)), shuffle=False, valid_share=0.0)
    train = build_loaders(config, seq_len, 1000, 1, tmp_path).train
    assert train.samples_per_epoch == rows
    batch = train.rows(0, rows)
    # A sample of 16 tokens has no 17th to predict, so its last target takes no part.
    targets = batch.inputs + 1
    if seq_len == 16:
        targets[:, -1] = -100
    assert np.array_equal(batch.targets, targets)


@given(data=st.data())
@quiet
@pytest.mark.slow
def test_a_damaged_shard_is_a_data_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    write(tmp_path)
    path = tmp_path / "shard.00000.mds"
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        for tokens in read_all(tmp_path):
            assert len(tokens) <= len(raw)
    except DataError as error:
        assert error.hint


@given(data=st.data())
@quiet
@pytest.mark.slow
def test_a_hostile_index_is_a_data_error(tmp_path: Path, data: st.DataObject) -> None:
    write(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    odd = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.lists(st.integers(), max_size=2))
    entry = index["shards"][0]
    where = data.draw(st.sampled_from([index, entry, entry["raw_data"]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(odd)
    (tmp_path / "index.json").write_text(json.dumps(index))
    try:
        read_all(tmp_path)
    except DataError as error:
        assert error.hint


@pytest.mark.parametrize("name", ["../secret.mds", "/etc/passwd", "a/../../b", "C:\\x", "x\0y", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = name
    with pytest.raises(DataError, match="malformed"):
        mds_reader.parse_index(json.dumps(index).encode(), "index.json")


@given(raw=st.binary(max_size=200))
@quiet
def test_any_bytes_as_an_index(raw: bytes) -> None:
    with pytest.raises(DataError):
        mds_reader.parse_index(raw, "index.json")


def test_a_missing_shard_is_named_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path, rows=30, width=17)
    (tmp_path / "shard.00000.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00000\.mds is missing") as caught:
        build_loaders(DataConfig(path=str(tmp_path)), 16, 1000, 1, tmp_path)
    assert "verify" in (caught.value.hint or "")


def test_an_open_shard_takes_next_to_no_memory(tmp_path: Path) -> None:
    writer = mds_writer.TokenShardWriter(tmp_path, "shard", np.dtype(np.int32))
    writer.add_rows(np.zeros((100_000, 8), np.int32))
    writer.flush()
    mds_writer.write_index(tmp_path, writer.entries)
    (entry,) = mds_reader.parse_index((tmp_path / "index.json").read_bytes(), "index")
    mds_reader.TokenShard(tmp_path / entry.basename, entry, "tokens")
    tracemalloc.start()
    try:
        shard = mds_reader.TokenShard(tmp_path / entry.basename, entry, "tokens")
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shard.table.shape == (100_000, 8)
    assert held_bytes < 50_000
