import json
from pathlib import Path

import numpy as np
import pytest

from keepstep.observe import history, report, view
from keepstep.observe.history import History, open_history, open_recent
from keepstep.observe.run_folder import JsonLines, Record, RunFolder, read_from
from keepstep.observe.screen import screen
from keepstep.observe.sinks import metric_sinks
from tests.observe.make_runs import Writer, write_long


def test_history_reads_only_what_is_new(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.take(5)
    seen = open_history(writer.folder)
    assert seen.train.last("step") == 5
    assert not seen.refresh()
    writer.take(3)
    assert seen.refresh()
    assert seen.train.column("step").tolist() == list(range(1, 9))
    assert seen.events[0]["kind"] == "start"


def test_history_moves_repeated_steps_to_rolled_back(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.take(50)
    seen = open_history(writer.folder)
    writer.fault()
    writer.recover(lost=20)
    writer.take(5)
    seen.refresh()
    fresh = open_history(writer.folder)
    for told in (seen, fresh):
        assert told.train.column("step").tolist() == list(range(1, 36))
        assert told.rolled_back.column("step").tolist() == list(range(31, 51))
        assert told.rolled_back.column("step_s").sum() == pytest.approx(10, rel=0.1)


def test_history_reads_long_files_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "run")
    writer.take(300)
    monkeypatch.setattr(history, "_PIECE_BYTES", 5000)
    assert open_history(writer.folder).train.column("step").tolist() == list(range(1, 301))


def test_history_starts_over_for_a_replaced_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    JsonLines(path).append({"step": 9, "loss": 1.0})
    seen = open_history(RunFolder(tmp_path / "run"))
    path.unlink()
    JsonLines(path).append({"step": 1, "loss": 7.0})
    assert seen.refresh()
    assert seen.train.column("loss").tolist() == [7.0]


def test_history_starts_over_despite_a_reused_inode(
    tmp_path: Path,
) -> None:
    history = History(RunFolder(tmp_path))
    events, metrics = tmp_path / "events.jsonl", tmp_path / "metrics.jsonl"
    events.write_text('{"time": 1.0, "kind": "start"}\n{"time": 2.0, "kind": "finish"}\n')
    metrics.write_text('{"time": 1.5, "step": 1, "loss": 1.0}\n')
    history.refresh()
    metrics.unlink()
    events.write_text('{"time": 3.0, "kind": "start"}\n')
    history.refresh()
    assert (len(history.train), [event["time"] for event in history.events]) == (0, [3.0])
    metrics.write_text('{"time": 3.5, "step": 1, "loss": 3.0}\n')
    history.refresh()
    # Written in place: the number of a deleted file goes to the next one that is made.
    metrics.write_text("".join(f'{{"time": 4.5, "step": {step}, "loss": 4.0}}\n' for step in (1, 2, 3)))
    history.refresh()
    assert history.train.column("loss").tolist() == [4.0, 4.0, 4.0]


def test_column_cache_gives_the_same_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MIN_BYTES", 100)
    writer = Writer(tmp_path / "run")
    writer.take(400)
    plain = open_history(writer.folder, tmp_path / "cache")
    writer.take(3)
    reads: list[int] = []
    original = history.read_from
    monkeypatch.setattr(history, "read_from", lambda path, at=0, n=-1: reads.append(at) or original(path, at, n))
    cached = open_history(writer.folder, tmp_path / "cache")
    assert min(at for at in reads if at) > 10_000, "the first bytes came from the cache"
    assert cached.train.column("step").tolist() == list(range(1, 404))
    for name in plain.train.names:
        np.testing.assert_array_equal(cached.train.column(name)[:400], plain.train.column(name))
    assert cached.valid.column("valid_loss").tolist() == plain.valid.column("valid_loss").tolist()


@pytest.mark.parametrize("damage", [b"", b"garbage", b'{"format": "other"}\n'])
def test_column_cache_is_ignored_when_damaged_or_outdated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr(history, "MIN_BYTES", 100)
    writer = Writer(tmp_path / "run")
    writer.take(50)
    open_history(writer.folder, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(damage)
    assert len(open_history(writer.folder, tmp_path / "cache").train) == 50
    lines = [json.loads(line) for line in writer.folder.metrics.read_text().splitlines()]
    writer.folder.metrics.write_text("".join(json.dumps({**line, "loss": 1.0}) + "\n" for line in lines))
    assert open_history(writer.folder, tmp_path / "cache").train.last("loss") == 1.0


def test_long_run_stores_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sinks, "COLUMNS_EVERY", 500)
    folder = write_long(tmp_path / "run", 1740, 1)
    assert folder.columns.is_file()
    taken: list[int] = []
    original = History._add
    monkeypatch.setattr(History, "_add", lambda self, lines: taken.append(len(lines)) or original(self, lines))
    seen = open_history(folder)
    assert sum(taken) < 500
    assert seen.train.column("step").tolist() == list(range(1, 1741))
    assert seen.train.column("loss").max() == 99


def test_open_recent_reads_all_events_but_few_metrics(tmp_path: Path) -> None:
    folder = write_long(tmp_path / "run", 3000, 1)
    seen = open_recent(folder, limit_bytes=20_000)
    assert 10 < len(seen.train) < 200
    assert seen.train.last("step") == 3000
    assert seen.events[0]["kind"] == "start"


def test_history_of_an_empty_folder_is_empty(tmp_path: Path) -> None:
    seen = History(RunFolder(tmp_path))
    assert not seen.refresh()
    assert seen.newest_ranks() == {}
    assert seen.newest_samples() == []
    assert seen.facts() == {}
    assert seen.config_text() == ""


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("events", b'{"tyme": 1, "kind": "fault", "step": 3}'),
        ("events", b'{"time": 1e999, "kind": "checkpoint_committed", "step": 3}'),
        ("events", b'{"time": 1, "kind": "checkpoint_committed", "step": "x", "total_steps": "x"}'),
        ("metrics", b'{"step": 1e999, "loss": 1}'),
        ("metrics", b'{"step": 51, "loss": []}'),
        ("metrics", b'{"step": 51, "time": 1e9, "loss": 1' + b"0" * 400 + b"}"),
        ("ranks", b'{"step": 51, "step_s": 7}'),
    ],
)
def test_views_survive_damaged_lines_that_are_valid_json(tmp_path: Path, file: str, line: bytes) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.take(50)
    with getattr(writer.folder, file).open("ab") as damaged:
        damaged.write(line + b"\n")
    writer.take(1)
    with getattr(writer.folder, file).open("ab") as damaged:
        damaged.write(line + b"\n")
    seen = open_history(writer.folder)
    assert report.markdown(seen, writer.now)
    assert screen(seen, writer.now, 100, 40)
    assert view.overview(seen, writer.now)["verdict"]["step"] == 51
    assert view.summary(open_recent(writer.folder), writer.now)["total_steps"] == 1000


@pytest.mark.parametrize("piece_bytes", [2**21, 700], ids=["at once", "in pieces"])
def test_history_drops_validations_of_an_abandoned_attempt(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_PIECE_BYTES", piece_bytes)
    writer = Writer(tmp_path / "run", save_every=100)
    writer.start()
    writer.take(350)
    seen = open_history(writer.folder)
    assert seen.valid.column("step").tolist() == [100, 200, 300]
    writer.fault()
    writer.recover(lost=200)
    writer.take(10)
    seen.refresh()
    for told in (seen, open_history(writer.folder)):
        assert told.valid.column("step").tolist() == [100]
    writer.take(100)
    writer.metrics.append({"step": 200, "time": writer.now, "valid_loss": 9.0})
    seen.refresh()
    for told in (seen, open_history(writer.folder)):
        assert told.valid.column("step").tolist() == [100, 200]
        assert told.valid.last("valid_loss") == 9.0
        assert told.train.column("step").tolist() == list(range(1, 261))
        assert len(told.rolled_back) == 200


def test_history_reads_lines_behind_a_hole(tmp_path: Path) -> None:
    """A power cut may leave megabytes of zeros where lines were under way: the run went on behind them."""
    writer = Writer(tmp_path / "run")
    writer.take(10)
    with writer.folder.metrics.open("ab") as file:
        file.write(bytes(5 * 2**20))
    seen = open_history(writer.folder)
    assert len(seen.train) == 10
    writer.take(10)
    seen.refresh()
    assert len(seen.train) == 20
    assert len(open_history(writer.folder).train) == 20


@pytest.mark.parametrize("ranks", [8, 4000, 60_000])
def test_newest_ranks_reads_one_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """A list of thirty runs of 512 ranks took four seconds of processor time, and the page asks every four."""
    folder = RunFolder(tmp_path / "run").create()
    line = json.dumps({"step_s": [0.123456789] * ranks}).encode() + b"\n"
    with folder.ranks.open("wb") as file:
        file.write(line * (6 * 2**20 // len(line) + 1))
        file.write(json.dumps({"step_s": [0.5] * ranks, "step": 7}).encode() + b"\n")
    parsed: list[int] = []

    def counted(path: Path, offset: int = 0) -> tuple[list[Record], int]:
        parsed.append(path.stat().st_size - offset)
        return read_from(path, offset)

    monkeypatch.setattr(history, "read_from", counted)
    assert History(folder).newest_ranks()["step"] == 7
    assert sum(parsed) < 2**17 + 20 * len(line)
