import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from make_runs import Writer

from keepstep.cli.main import main
from keepstep.observe.folder import RunFolder
from keepstep.observe.logs import JsonLogHandler


@pytest.fixture(autouse=True)
def no_colour_and_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, name in enumerate(("base", "warm")):
        writer = Writer(tmp_path / "runs" / name, steps=400, seed=number, lr=1e-3 * (number + 1), now=time.time() - 240)
        writer.start()
        writer.take(250)
        writer.fault()
        writer.recover(lost=50)
        writer.take(150)
        if number:
            writer.take(50)
            writer.finish()
    return tmp_path / "runs"


def test_runs_lists_state_and_last_loss(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^RUN +STATE +STEP +LOSS", out)
    assert re.search(r"^warm +finished +400/400 +\d\.\d{4}", out, re.MULTILINE)
    assert err.startswith("next: keepstep watch")
    assert main(["runs", "--runs-dir", str(runs), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["step"] for row in rows} == {"base": 350, "warm": 400}


def test_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_compare_shows_config_and_curve_differences(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "compare", "base", "warm", "--runs-dir", str(runs)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^optimizer.lr +0.001 +0.002$", out, re.MULTILINE)
    assert "data: no difference" in out
    assert "curves: first differ at step 1;" in out
    assert "loss: base, warm" in out
    assert main(["runs", "compare", "base", "base", "--runs-dir", str(runs)]) == 0
    assert "identical over all 350 common steps" in capsys.readouterr().out
    assert main(["runs", "compare", "base", "warm", "--runs-dir", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]["common_steps"] == 350


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = RunFolder(runs / "broken").create()
    broken.config.write_text("")
    broken.metrics.mkdir()
    assert main(["runs", str(runs), "--json"]) == 0
    told = capsys.readouterr()
    assert {row["name"] for row in json.loads(told.out)} == {"base", "warm"}
    assert "broken is left out" in told.err


@pytest.mark.parametrize("seconds", ["-1", "0", "nan"])
def test_watch_needs_time_between_looks(runs: Path, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "base", "--runs-dir", str(runs), f"--every={seconds}"]) == 2
    assert "--every" in capsys.readouterr().err


def test_a_loss_that_is_no_number_in_one_run_alone_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, broken in (("whole", 0), ("broken", 31)):
        writer = Writer(tmp_path / name, seed=7)
        for step in range(1, 51):
            writer.step = step
            writer.metrics.append({**writer.line(), **({"loss": math.nan} if 0 < broken <= step else {})})
    assert main(["runs", "compare", "whole", "broken", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "identical" not in out
    assert "curves: first differ at step 31" in out
    assert "only one of them has a finite loss at 20 of 50 steps" in out
    assert main(["runs", "compare", "whole", "broken", "--runs-dir", str(tmp_path), "--json"]) == 0
    curves = json.loads(capsys.readouterr().out)["curves"]
    assert (curves["identical"], curves["common_steps"], curves["first_difference_step"]) == (False, 50, 31)


@pytest.mark.parametrize("words", [["compare", "a"], ["logs"], ["dashboards"], ["a", "b"], ["compare", "base", "bse"]])
def test_what_makes_no_sense_is_answered_with_a_hint(
    runs: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *words, "--runs-dir", str(runs)]) == 2
    assert " hint: " in capsys.readouterr().err


def test_watch_shows_the_essentials_once_where_there_is_no_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(runs / "warm")]) == 0
    out, err = capsys.readouterr()
    for part in ("finished  warm  step 400 of 400", "lost if killed now", "goodput", "wall clock", "┤", "fault"):
        assert part in out
    assert max(map(len, out.splitlines())) < 100
    assert "next: keepstep report" in err
    assert main(["watch", "warm", "--runs-dir", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_watch_moves_no_cursor_on_a_dumb_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert main(["watch", str(runs / "warm")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["30", "60", "200"])
def test_watch_copes_with_any_width(
    runs: Path, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["watch", str(runs / "base")]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[1:])) < int(columns)


def test_a_report_is_one_file_with_everything_and_nothing_that_runs(runs: Path, tmp_path: Path) -> None:
    (runs / "base" / "config.yaml").write_text("name: <script>alert(1)</script>\n")
    page = tmp_path / "out" / "base.html"
    assert main(["report", str(runs / "base"), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 3
    for part in ("The plan beside the truth", "Goodput by cause", "worker killed by SIGKILL (rank 3)", "H200"):
        assert part in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"""(src|href)=["']?https?:""", text)


def test_a_report_in_markdown_has_its_plots_as_text(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "warm"), "-o", "-"]) == 0
    text = capsys.readouterr().out
    assert "## Goodput by cause" in text
    assert "| lost | steps done and gone back from |" in text
    assert "┤" in text
    assert main(["report", str(runs / "warm"), "-o", "x.pdf"]) == 2


def test_logs_of_all_ranks_are_merged_and_the_first_real_error_is_on_top(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = RunFolder(runs / "base").logs
    loggers = []
    for rank in range(2):
        logger = logging.Logger(f"test{rank}")
        logger.addHandler(JsonLogHandler(logs, "trainer", rank))
        loggers.append(logger)
    loggers[0].info("step %d", 1)
    loggers[1].warning("slow")
    for logger, error in (
        (loggers[0], ConnectionResetError("Connection reset by peer")),
        (loggers[1], ValueError("real")),
    ):
        try:
            raise error
        except (OSError, ValueError):
            logger.exception("died")
    for logger in loggers:
        logger.handlers[0].close()
    assert main(["runs", "logs", "base", "--runs-dir", str(runs)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("first error: trainer/1\n")
    assert out.index("ValueError: real") < out.index("step 1") < out.index("slow")
    assert main(["runs", "logs", "base", "--runs-dir", str(runs), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["lines"]) == 4


def test_dashboards_and_rules_are_written_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "dashboards", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gpus.json", "job.json", "nodes.json", "rules.yaml", "storage.json",
    ]  # fmt: skip


def test_the_page_of_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "/nowhere"]) == 2
    assert main(["ui", "/tmp", "--host", "0.0.0.0"]) == 2
    assert "there is no token" in capsys.readouterr().err


@pytest.mark.slow
def test_ui_serves_one_run_or_a_folder_and_ends_with_its_parent(runs: Path) -> None:
    words = [sys.executable, "-m", "keepstep", "ui", str(runs / "base"), "--port", "0", "--until-stdin-closes"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdin
        server.stdout.readline()
        link = server.stdout.readline().split()[1]
        assert link.endswith("#run=base")
        with urllib.request.urlopen(link.partition("#")[0] + "api/runs", timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 2
        server.stdin.close()
        assert server.wait(20) == 0


def test_the_link_to_a_run_survives_any_name(runs: Path) -> None:
    """`+` means a space in an address, and `&` the end of a value: the page would open another run."""
    (runs / "base").rename(runs / "a+b & 50%")
    words = ["ui", str(runs / "a+b & 50%"), "--port", "0", "--no-cache", "--until-stdin-closes"]
    with subprocess.Popen(
        [sys.executable, "-m", "keepstep", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        assert server.stdin
        server.stdout.readline()
        link = server.stdout.readline().removeprefix("open ").strip()
        server.stdin.close()
    assert parse_qs(urlsplit(link).fragment) == {"run": ["a+b & 50%"]}
    assert " " not in link


@pytest.mark.slow
def test_train_with_ui_prints_a_link_to_a_page_that_ends_with_the_run(tmp_path: Path) -> None:
    words = [
        "model.layers=1", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
        "global_batch=4", "microbatch=4", "max_duration=1000000ba", "compute.device=cpu", "compute.threads=1",
        "schedule.warmup=2ba", "observe.metrics_port=0", "name=tiny", "runs_dir=runs", "--procs", "1", "--ui",
    ]  # fmt: skip
    call = [sys.executable, "-m", "keepstep", "train", *words]
    with subprocess.Popen(call, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as train:
        assert train.stderr
        link = next(line for line in train.stderr if line.startswith("live page: ")).split()[2]
        assert link.endswith("#run=tiny")
        page = link.partition("#")[0]
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with urllib.request.urlopen(page + "api/runs", timeout=20) as answer:
                if any(row["name"] == "tiny" and row["step"] > 5 for row in json.load(answer)["runs"]):
                    break
            time.sleep(0.5)
        else:
            pytest.fail("no step was seen on the page")
        train.terminate()
        train.stderr.read()
        assert train.wait(60) == 75, "saved and stopped on request"
    end = time.monotonic() + 30
    while answers(page):
        assert time.monotonic() < end, "the page outlived the run"
        time.sleep(0.3)


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


def commands_in_the_docs() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("keepstep ")]


@pytest.mark.slow
def test_every_command_of_the_page_about_observing_works(runs: Path, tmp_path: Path) -> None:
    commands = commands_in_the_docs()
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[0] == "keepstep"
        if words[1] in ("ui", "train"):
            # These go on until they are stopped: that they understand their words is what can be tried here.
            code = "import argparse, sys; from keepstep.cli import ui, train; p = argparse.ArgumentParser();"
            code += f"{words[1]}.add_arguments(p); p.parse_intermixed_args(sys.argv[1:])"
            call = [sys.executable, "-c", code, *words[2:]]
        else:
            call = [sys.executable, "-m", "keepstep", *words[1:]]
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), timeout=60)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
