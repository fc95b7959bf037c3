"""One damaged or hostile run folder: the page and the list show the others, and that run's damage as its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.core.files import read_regular
from keepstep.core.step_folders import MARKER, folder_name
from keepstep.observe import history
from keepstep.observe.access import Access
from keepstep.observe.history import History, open_history
from keepstep.observe.page.server import PageServer
from keepstep.observe.report import markdown
from keepstep.observe.run_folder import RunFolder, read_from
from keepstep.observe.view import config_difference
from tests.observe.make_runs import Writer

DEEP = "[" * 100_000 + "]" * 100_000
WALKABLE = "[" * 600 + "]" * 600
"""Parsed, but deeper than code that walks it with two calls for each level."""
SECRET = "root:x:0:0:a file outside of the run"
FILES = ("metrics.jsonl", "events.jsonl", "ranks.jsonl", "samples.jsonl", "config.yaml", "facts.json")
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("bad", "good"):
        writer = Writer(tmp_path / "runs" / name)
        writer.start()
        writer.take(5)
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "runs"


@pytest.fixture
def server(runs: Path) -> Iterator[PageServer]:
    made = PageServer(runs, Access())
    yield made
    made.server_close()


def ask(server: PageServer, path: str, **query: str) -> dict:
    return json.loads(server.answer(path, query).body)


def see_everything(server: PageServer) -> dict[str, dict]:
    """Ask for all that the page shows of both runs; the rows of the list by name."""
    server.warm()
    rows = {row["name"]: row for row in ask(server, "/api/runs")["runs"]}
    assert rows["good"]["step"] == 5
    for path in ("/api/view", "/api/config", "/api/logs"):
        for run in ("good", "bad"):
            answer = server.answer(path, {"run": run, "overlay": "bad", "against": "good"})
            assert SECRET.encode() not in answer.body
    return rows


def append(name: str, text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(text + "\n")

    damage.__name__ = f"{name} {text[:30]}"
    return damage


DEEP_LINES = [
    *(append(name, text) for name in FILES[:4] for text in (DEEP, f'{{"time": 5, "kind": {DEEP}, "step": 3}}')),
    *(append(name, f'{{"time": 5, "kind": "start", "step": 9, "x": {WALKABLE}}}') for name in FILES[:4]),
    lambda run: (run / "facts.json").write_text(f'{{"plan": {DEEP}}}'),
    lambda run: (run / "facts.json").write_text(f'{{"plan": {{"mfu": {WALKABLE}}}}}'),
    lambda run: (run / "metrics.columns").write_text(DEEP + "\n"),
]
HUGE_NUMBERS = [
    append(name, f'{{"time": {time}, "kind": "start", "step": {step}, "total_steps": {step}, "loss": 1}}')
    for name in ("metrics.jsonl", "events.jsonl")
    for time, step in (("1e300", "9"), ('"1e300"', "9"), ("-1e300", "9"), ("9" * 4000, "9"), ("5", "1e300"))
]


@pytest.mark.parametrize("damage", DEEP_LINES + HUGE_NUMBERS, ids=lambda each: each.__name__[:40])
def test_page_shows_other_runs_despite_damaged_lines(server: PageServer, damage: Callable[[Path], None]) -> None:
    damage(server.runs_dir / "bad")
    assert set(see_everything(server)) == {"good", "bad"}
    bad = open_history(RunFolder(server.runs_dir / "bad"))
    assert "# bad" in markdown(bad, 1e9)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replace", [os.mkfifo, lambda path: path.symlink_to(path.parents[2] / "secret")])
def test_page_reads_regular_files_only(server: PageServer, name: str, replace: Callable[[Path], None]) -> None:
    path = server.runs_dir / "bad" / name
    path.unlink(missing_ok=True)
    replace(path)
    assert f"{name} is not a regular file" in see_everything(server)["bad"]["reasons"]
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        read_regular(path, 100)


def test_page_reads_no_logs_or_markers_outside_of_a_run(server: PageServer, tmp_path: Path) -> None:
    bad = RunFolder(server.runs_dir / "bad")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text(json.dumps({"text": SECRET}) + "\n")
    bad.logs.rmdir()
    bad.logs.symlink_to(tmp_path / "other")
    for step in (7, 10**20):
        folder = bad.checkpoints / folder_name(step)
        folder.mkdir(parents=True)
        os.mkfifo(folder / MARKER)
    assert see_everything(server)["bad"]["saved_step"] == -1


def test_page_and_list_show_a_run_that_raises_as_damaged(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refresh = History.refresh

    def fail(seen: History) -> bool:
        if seen.folder.name == "bad":
            raise ArithmeticError("nobody thought of this")
        return refresh(seen)

    monkeypatch.setattr(History, "refresh", fail)
    rows = {row["name"]: row for row in ask(server, "/api/runs")["runs"]}
    assert rows["bad"]["state"] == "damaged"
    assert "nobody thought of this" in rows["bad"]["reasons"][0]
    assert main(["runs", "list", str(server.runs_dir)]) == 0
    assert "damaged" in capsys.readouterr().out


def test_column_copy_with_a_wrong_table_is_ignored(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.take(50)
    open_history(writer.folder).store_columns()
    header, _, body = writer.folder.columns.read_bytes().partition(b"\n")
    writer.folder.columns.write_bytes(header.replace(b'"undone"', b'"other"') + b"\n" + body)
    assert open_history(writer.folder).train.column("step").tolist() == list(range(1, 51))


@pytest.mark.slow
def test_comparison_of_an_alias_bomb_ends(server: PageServer) -> None:
    (server.runs_dir / "bad" / "config.yaml").write_text(BOMB)
    (row,) = [
        row
        for row in ask(server, "/api/config", run="bad", against="good")["difference"]
        if row["key"] == "config.yaml"
    ]
    assert "too large or too deeply nested" in row["right"]
    (row, _) = config_difference("a: " + "[" * 300 + "]" * 300, "a: 1")[::-1]
    assert "too deeply nested" in row["left"]


def test_lines_without_an_end_need_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte without a line end was read as one piece."""
    monkeypatch.setattr(history, "_PIECE_BYTES", 1000)
    sizes: list[int] = []
    monkeypatch.setattr(history, "read_from", lambda path, at, limit: sizes.append(limit) or read_from(path, at, limit))
    writer = Writer(tmp_path / "run")
    for path in (writer.folder.metrics, writer.folder.events):
        path.write_text("x" * 50_000 + '\n{"step": 1, "time": 5, "kind": "start", "loss": 2}\n')
    seen = open_history(writer.folder)
    assert max(sizes) == 1000
    assert (seen.train.last("loss"), len(seen.events)) == (2.0, 1)


def test_markdown_report_escapes_the_name_of_a_run(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "<img src=x> [click](evil) *b*")
    writer.take(2)
    title = markdown(open_history(writer.folder), 1e9).splitlines()[0]
    assert title == r"# &lt;img src=x&gt; \[click\](evil) \*b\*"
