"""The ids of the data are compared with the vocabulary and the tokenizer before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from keepstep.config.schema import DataConfig
from keepstep.core.errors import NothingToReadError
from keepstep.data import tokenization
from keepstep.data.formats.mds_writer import TokenShardWriter, write_index
from keepstep.data.formats.megatron import MegatronReader, MegatronWriter, find_prefixes
from keepstep.data.loader import build_loaders
from keepstep.data.prepare.build import build
from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file
from tests.train.tiny_runs import losses, run_processes

IDS = 500
"""Ids of the tests' tokenizer."""


def built(folder: Path, corpus: Path, tokenizer: Path, **options: object) -> Path:
    chosen = BuildOptions((str(corpus),), sha256_file(tokenizer), **options)  # type: ignore[arg-type]
    build(folder, make_plan(chosen), tokenizer, workers=1)
    return folder


def forget(folder: Path, *keys: str) -> Path:
    """Remove facts from a data set, as if an earlier version had built it."""
    path = folder / "dataset.json"
    facts = {key: value for key, value in json.loads(path.read_text()).items() if key not in keys}
    path.write_text(json.dumps(facts))
    return folder


def open_with(path: Path, vocab: int, cache: Path, **config: object) -> None:
    build_loaders(DataConfig(path=str(path), **config), 16, vocab, 1, cache)  # type: ignore[arg-type]


def largest_token(folder: Path) -> int:
    return max(int(MegatronReader(prefix).tokens.max()) for prefix in find_prefixes(folder))


@pytest.mark.parametrize(
    "options", [{}, {"limit": 30}, {"format": "mds"}, {"format": "mds", "concat": 64}, {"format": "mds", "limit": 9}]
)
def test_build_records_largest_id(tmp_path: Path, corpus: Path, tokenizer: Path, options: dict[str, object]) -> None:
    from keepstep.data.inspect import inspect, open_documents

    folder = built(tmp_path / "out", corpus, tokenizer, **options)
    recorded = json.loads((folder / "dataset.json").read_text())["largest_id"]
    assert recorded == inspect(*open_documents(str(folder), tmp_path))["largest_id"]


@pytest.mark.parametrize("forgotten", [(), ("largest_id",)])
@pytest.mark.parametrize("kind", ["megatron", "mds"])
def test_small_vocabulary_is_refused_with_the_number_that_suffices(
    tmp_path: Path, corpus: Path, tokenizer: Path, forgotten: tuple[str, ...], kind: str
) -> None:
    folder = forget(built(tmp_path / "out", corpus, tokenizer, format=kind), *forgotten)
    with pytest.raises(NothingToReadError, match=r"holds token \d+, but model\.vocab is 300") as caught:
        open_with(folder, 300, tmp_path)
    assert caught.value.hint == f"model.vocab=512 covers all {IDS} ids; or use another tokenizer"
    assert caught.value.exit_code == 4
    open_with(folder, 512, tmp_path)


def test_vocabulary_below_the_tokenizer_is_enough_for_smaller_ids(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9"}\n' * 40)
    folder = built(tmp_path / "out", rows, tokenizer)
    largest = largest_token(folder)
    assert largest < IDS - 1, "the data does not use every id"
    open_with(folder, largest + 1, tmp_path)
    assert "notice" not in capsys.readouterr().err
    open_with(forget(folder, "largest_id"), largest + 1, tmp_path)
    assert f"has ids up to {IDS - 1}, but model.vocab is {largest + 1}" in capsys.readouterr().err


@pytest.mark.slow
def test_run_with_a_small_vocabulary_ends_before_the_first_step(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    folder = built(tmp_path / "out", corpus, tokenizer)
    done = run_processes(tmp_path, 1, f"data.path={folder}", "model.vocab=300")
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert "hint: model.vocab=512 covers all 500 ids" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or losses(tmp_path) == []
    done = run_processes(tmp_path, 1, f"data.path={folder}", "model.vocab=512", "max_duration=1ba")
    assert done.returncode == 0, done.stderr


def test_eos_id_is_checked_without_reading_the_data(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = tmp_path / "tokenizer.json"
    loaded = tokenization.load(tokenizer)
    loaded.add_special_tokens(["<|end|>"])
    loaded.save(str(special))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "aaaa bbbb cccc dddd eeee ffff"}\n' * 40)
    folder = forget(built(tmp_path / "out", rows, special, eos="<|end|>"), "largest_id")
    monkeypatch.setattr("keepstep.data.datasets.MegatronSet.token_blocks", lambda *_: iter(()))
    with pytest.raises(NothingToReadError, match=f"holds token {IDS}, but model.vocab is {IDS}"):
        open_with(folder, IDS, tmp_path)


@pytest.mark.parametrize("kind", ["megatron", "mds"])
def test_data_without_facts_is_scanned(tmp_path: Path, kind: str) -> None:
    documents = [np.full(40, number, dtype=np.int32) for number in (1, 2, 3, 64, 700, 5)]
    if kind == "mds":
        writer = TokenShardWriter(tmp_path / "set", "shard.00000", np.dtype("<i4"))
        for document in documents:
            writer.add(document)
        writer.flush()
        write_index(tmp_path / "set", writer.entries)
    else:
        with MegatronWriter(tmp_path / "set" / "x", np.dtype("<u2")) as pair:
            for document in documents:
                pair.add(document)
    with pytest.raises(NothingToReadError, match=r"holds token 700, but model\.vocab is 65") as caught:
        open_with(tmp_path / "set", 65, tmp_path)
    assert "model.vocab=704 covers all 701 ids" in str(caught.value.hint)
    open_with(tmp_path / "set", 701, tmp_path)


def test_large_data_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.data.datasets._BLOCK_TOKENS", 10)
    monkeypatch.setattr("keepstep.data.datasets._SCANNED_TOKENS", 100)
    monkeypatch.setattr("keepstep.data.datasets._SCANNED_FOR_HINT", 5_000)
    tokens = np.ones(1000, dtype=np.int32)
    tokens[900:], tokens[15] = 60, 90
    with MegatronWriter(tmp_path / "x", np.dtype("<i4")) as pair:
        pair.add(tokens)
    with pytest.raises(NothingToReadError, match=r"holds token 60, but model\.vocab is 50") as caught:
        open_with(tmp_path / "x", 50, tmp_path)
    assert "model.vocab=128 covers all 91 ids" in str(caught.value.hint)


def test_validation_data_and_blends_are_checked(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    folder = built(tmp_path / "out", corpus, tokenizer)
    with MegatronWriter(tmp_path / "small", np.dtype("<u2")) as pair:
        for start in range(0, 200, 20):
            pair.add(np.arange(start, start + 20))
    for config in ({"valid_path": str(folder)}, {"blend": {str(tmp_path / "small"): 1.0, str(folder): 1.0}}):
        with pytest.raises(NothingToReadError, match=f"{folder} holds token"):
            open_with(tmp_path / "small", 300, tmp_path, **config)


def test_tokenizer_with_fewer_ids_than_the_data_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    other = tmp_path / "other.json"
    tokenization.train_bpe(["a few words"], tokenization.SMALLEST_VOCAB, other)
    folder = built(tmp_path / "out", corpus, tokenizer)
    with pytest.raises(NothingToReadError, match=f"tokenizer {other} has only {tokenization.SMALLEST_VOCAB} ids"):
        open_with(folder, IDS, tmp_path, tokenizer=str(other))
    open_with(folder, IDS, tmp_path, tokenizer=str(tokenizer))
