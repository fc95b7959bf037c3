"""The page, the report and TensorBoard show what the run recorded: each number is read off the picture's data."""

import re
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from keepstep.core.files import write_json
from keepstep.observe import report
from keepstep.observe.history import History
from keepstep.observe.plot import draw_figure
from keepstep.observe.run_folder import JsonLines, Record, is_validation
from keepstep.observe.sinks.trackers import FOUNDRY_TAGS, TensorBoardSink
from keepstep.observe.view import SERIES, SPLIT, overview, plan_and_measured, series
from tests.observe.make_runs import Writer

STEPS = 120
NEVER_SMOOTHED = ("valid_loss", "lr", "memory_gib")


def recorded(root: Path, *, mfu: bool = True) -> History:
    writer = Writer(root, steps=STEPS, save_every=30, now=time.time() - 600)
    made = writer.line
    writer.line = lambda: {  # type: ignore[method-assign]
        **{name: value for name, value in made().items() if mfu or name != "mfu"},
        "memory_gib": 60.0 + writer.step % 7,
    }
    writer.start()
    writer.take(STEPS)
    writer.finish()
    history = History(writer.folder)
    history.refresh()
    return history


def lines_of(history: History) -> list[Record]:
    return JsonLines(history.folder.metrics).read()


def recorded_values(history: History, name: str) -> dict[float, float]:
    return {line["step"]: line[name] for line in lines_of(history) if name in line}


@pytest.mark.parametrize("pieces", [17, STEPS * 2])
def test_series_hold_raw_values_next_to_smoothed_ones(tmp_path: Path, pieces: int) -> None:
    history = recorded(tmp_path / "run")
    names = [*SERIES, *(f"split.{part}" for part in SPLIT), "valid_loss"]
    shown = series(history, names, pieces, 0.98)
    for name in ("loss", "grad_norm", "tokens_per_s", "mfu", "step_s", *NEVER_SMOOTHED):
        values, curve = recorded_values(history, name), shown[name]
        assert curve["raw"] == pytest.approx([values[step] for step in curve["steps"]], rel=1e-6), name
        assert curve["steps"][-1] == STEPS, "nothing beyond the run's end"
        assert (curve["smooth"] == curve["raw"]) == (name in NEVER_SMOOTHED), name


def test_report_draws_raw_values(tmp_path: Path) -> None:
    history = recorded(tmp_path / "run")
    drawn = {title: draw_figure(lines, title=title).axes[0].get_lines() for title, lines in report.curves(history)}
    for title, name in (("Learning rate", "lr"), ("Peak memory in GiB", "memory_gib")):
        (line,) = drawn[title]
        assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(
            recorded_values(history, name)
        )
    raw, smoothed, validation = drawn["Loss"]
    assert list(raw.get_ydata()) == list(recorded_values(history, "loss").values())
    assert smoothed.get_label() == "training, smoothed 0.9"
    assert list(validation.get_ydata()) == pytest.approx(list(recorded_values(history, "valid_loss").values()))


def test_tensorboard_gets_raw_values(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    history = recorded(tmp_path / "run")
    sink = TensorBoardSink(tmp_path / "board")
    for line in lines_of(history):
        sink.write("metrics", line)
    sink.close()
    (path,) = (tmp_path / "board").iterdir()
    written: dict[str, dict[int, float]] = {}
    for event in loader.LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            written.setdefault(value.tag, {})[event.step] = value.simple_value
    for name in ("loss", "lr", "valid_loss", "mfu"):
        assert written[FOUNDRY_TAGS[name]] == pytest.approx(recorded_values(history, name), rel=1e-6), name


def test_unknown_peak_leaves_mfu_out_everywhere(tmp_path: Path) -> None:
    history = recorded(tmp_path / "run", mfu=False)
    assert "mfu" not in series(history, SERIES, 100, 0.9)
    assert not any("FLOPs" in title for title, _ in report.curves(history))
    assert not [row for row in plan_and_measured(history) if row["what"] == "mfu"]
    assert "MFU" not in report.markdown(history, time.time())


def test_validation_of_a_run_that_went_back_ends_with_the_run(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", steps=STEPS, save_every=30, now=time.time() - 600)
    writer.start()
    writer.take(60)
    writer.fault()
    writer.recover(lost=25)
    writer.take(5)
    history = History(writer.folder)
    history.refresh()
    assert any(is_validation(line) and line["step"] == 60 for line in lines_of(history)), "the file has what was lost"
    shown = series(history, ["loss", "valid_loss"], 500, 0.9)
    assert np.max(shown["loss"]["steps"]) == 40
    assert shown["valid_loss"]["steps"] == [30]


def test_page_draws_only_series_that_the_server_sends() -> None:
    script = resources.files("keepstep.observe.page").joinpath("static/app.js").read_text()
    charts = re.findall(r"names: \[([^\]]*)\], (?:optional|logs)", script)
    drawn = {name for names in charts for name in re.findall(r'"(\w+)"', names)}
    assert {"loss", "reward_mean", "expert_load_max"} <= drawn <= {*SERIES, "valid_loss"}


def scores(**categories: float) -> dict[str, object]:
    named = {name: {"count": 4, "right": 4 * share, "accuracy": share} for name, share in categories.items()}
    return {"live_ast": None, "relevance": categories.get("live_relevance"), "categories": named}


def test_page_and_report_compare_leaderboard_scores_with_the_start(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", steps=STEPS)
    writer.start()
    writer.take(STEPS)
    history = History(writer.folder)
    assert overview(history, writer.now)["leaderboard"]["rows"] == []
    assert "Leaderboard" not in report.markdown(history, writer.now)
    folder = writer.folder.bfcl
    folder.mkdir()
    write_json(folder / "step-100-native.json", scores(simple_python=0.75))
    write_json(folder / "step-20-native.json", scores(simple_python=0.5, live_relevance=1.0))
    write_json(folder / "start-prompt.json", scores(simple_python=0.25))
    for name, text in (("step-1-native", "[]"), ("step-2-native", '{"categories": {"x": {"count": "?"}}}'),
                       ("step-3-native", "{"), ("notes", "{}")):  # fmt: skip
        (folder / f"{name}.json").write_text(text)
    (folder / "step-4-native.json").symlink_to(folder / "start-prompt.json")
    shown = overview(history, writer.now)["leaderboard"]
    assert shown["heads"] == ["", "start, prompt", "step 20, native", "step 100, native"]
    assert shown["rows"] == [
        ["relevance", "–", "100.00%", "–"],
        ["· simple_python", "25.00%", "50.00%", "75.00%"],
        ["· live_relevance", "–", "100.00%", "–"],
        ["questions", "4", "8", "4"],
    ]
    assert "| · simple_python | 25.00% | 50.00% | 75.00% |" in report.markdown(history, writer.now)
    assert "<td>25.00%</td><td>50.00%</td><td>75.00%</td>" in report.page(history, writer.now)


def test_page_and_report_tell_what_the_training_data_has_of_the_benchmark(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", steps=STEPS)
    writer.start()
    writer.take(STEPS)
    history, check = History(writer.folder), writer.folder.bfcl / "data-check.json"
    check.parent.mkdir()
    expected = [["training rows compared", "36,000"], ["with something of the benchmark", "2"]]
    write_json(check, {"rows": 36000, "contaminated_rows": 2, "matches": []})
    assert overview(history, writer.now)["leaderboard"] == {"heads": ["", "training data"], "rows": expected}
    for name in ("start", "step-100"):
        write_json(check.parent / f"{name}-native.json", scores(simple_python=0.25))
    assert overview(history, writer.now)["leaderboard"]["rows"][-2:] == [[*row, ""] for row in expected]
    assert "| training rows compared | 36,000 |  |" in report.markdown(history, writer.now)
    for damaged in ("", "[]", '{"rows": 1}', '{"rows": "x", "contaminated_rows": 0}'):
        check.write_text(damaged)
        assert overview(history, writer.now)["leaderboard"]["rows"][-1][0] == "questions"


def test_report_has_the_newest_samples(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.take(20)
    writer.samples.append({"step": 20, "prompt": "Is it <wet>?", "text": " No."})
    history = History(writer.folder)
    assert "| 20 | Is it &lt;wet&gt;? |  No. |" in report.markdown(history, writer.now)
    assert "<td>Is it &lt;wet&gt;?</td><td> No.</td>" in report.page(history, writer.now)
