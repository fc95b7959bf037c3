"""The demo corpus and folders that are whole or absent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data import corpus, tokenization
from keepstep.data.corpus import unigram_perplexity
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.loader import build_loaders


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus.standard_library_files()[:60]
    monkeypatch.setattr(corpus, "standard_library_files", lambda: files)


@pytest.mark.usefixtures("few_files")
@pytest.mark.slow
def test_the_demo_is_prepared_once_and_decodes_to_source_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaders = build_loaders(DataConfig(), 64, 600, 1, tmp_path)
    assert "training a tokenizer" in capfd.readouterr().err
    again = build_loaders(DataConfig(), 64, 600, 1, tmp_path)
    assert capfd.readouterr().err == ""
    assert np.array_equal(loaders.train.rows(0, 4).inputs, again.train.rows(0, 4).inputs)
    assert loaders.tokenizer is not None
    assert loaders.facts["unigram_perplexity"] > 10
    text = tokenization.load(loaders.tokenizer).decode(
        MegatronReader(Path(loaders.facts["path"]) / "train").tokens[:500]
    )
    assert text.startswith(corpus.standard_library_files()[0].read_text()[:200])


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab is 100"):
        build_loaders(DataConfig(), 64, 100, 1, tmp_path)


def test_a_build_that_died_is_done_again(tmp_path: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise MemoryError

    with pytest.raises(MemoryError):
        corpus.prepare_folder(tmp_path / "set", die)
    assert not (tmp_path / "set").exists()
    (tmp_path / ".set.left.aside").mkdir()
    corpus.prepare_folder(tmp_path / "set", lambda folder: (folder / "whole").write_text("x") and None)
    assert [path.name for path in tmp_path.glob("*") if path.is_dir()] == ["set"]


def _append_line(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as file:
        file.write(f"{os.getpid()}\n")
    (folder / "whole").write_text("x")


def _prepare(path: str) -> None:
    corpus.prepare_folder(Path(path), _append_line)


@pytest.mark.slow
def test_two_processes_prepare_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_prepare, args=(str(tmp_path / "set"),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len((tmp_path / "builds").read_text().splitlines()) == 1


def test_unigram_perplexity_of_uniform_tokens_is_their_number() -> None:
    tokens = np.tile(np.arange(50), 1000)
    assert unigram_perplexity(tokens, tokens, 50) == pytest.approx(50, rel=1e-3)


def test_a_prepared_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("keepstep.data.cache_folder.sync_file", lambda path: synced.append(path.name))
    really = Path.rename

    def rename(self: Path, target: Path) -> Path:
        assert sorted(synced) == ["a.npy", "b.npy"]
        return really(self, target)

    def build(folder: Path) -> None:
        (folder / "inside").mkdir()
        (folder / "a.npy").touch()
        (folder / "inside" / "b.npy").touch()

    monkeypatch.setattr(Path, "rename", rename)
    assert (corpus.prepare_folder(tmp_path / "made", build) / "inside" / "b.npy").is_file()


class _DeafTokenizer:
    """As the real one while it trains: its code hears no Ctrl-C before it has done its work."""

    released = threading.Event()

    def __init__(self, _: object) -> None:
        pass

    def train_from_iterator(self, _: object, __: object) -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        self.released.wait(5)

    def to_str(self) -> str:
        return "trained to the end"

    def get_vocab_size(self) -> int:
        return 0


def test_the_training_of_a_tokenizer_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizers.Tokenizer", _DeafTokenizer)
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenization.train_bpe(["some text"], 300, tmp_path / "tokenizer.json")
    finally:
        _DeafTokenizer.released.set()
    assert not list(tmp_path.iterdir())
