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

from keepstep.cli.main import main
from keepstep.observe.logs import JsonLogHandler
from keepstep.observe.run_folder import RunFolder
from tests.observe.make_runs import Writer
from tests.patience import PATIENCE_S


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
    assert re.search(r"^RUN +STATE +STEP +ON DISK +LOSS", out)
    assert re.search(r"^warm +finished +400/400 +400 +\d\.\d{4}", out, re.MULTILINE)
    assert re.search(r"^base +healthy +350/400 +200 +\d\.\d{4}", out, re.MULTILINE)
    assert err.startswith("next: keepstep watch")
    assert main(["runs", "--runs-dir", str(runs), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["step"] for row in rows} == {"base": 350, "warm": 400}


def test_run_verbs_show_the_step_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(tmp_path / "full", steps=40, save_every=10, now=time.time() - 60)
    writer.start()
    writer.take(10)
    writer.save_every = 1000
    writer.take(20)
    writer.fail_to_save()
    writer.take(10)
    writer.fail_to_save()
    writer.finish()
    assert main(["runs", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "finished" not in table
    assert re.search(r"^full +failed +40/40 +10 \(2 skipped\)", table, re.MULTILINE)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["saved_step"], row["skipped_saves"]) == (40, 10, 2)
    assert main(["watch", str(writer.root)]) == 0
    screen = capsys.readouterr().out
    assert "it did all 40 steps, but only step 10 is on disk" in screen
    assert re.search(r"on disk step 10, \S+ ago", screen)
    assert "skipped saves 2" in screen
    assert main(["watch", str(writer.root), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["saved_step"], verdict["skipped_saves"], verdict["checkpoint_step"]) == (10, 2, 10)
    assert main(["report", str(writer.root), "-o", "-"]) == 0
    report = capsys.readouterr().out
    assert "| on disk | step 10 |" in report
    assert "| skipped saves | 2 |" in report


def test_runs_of_an_empty_folder_hints_at_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_runs_compare_shows_config_and_curve_differences(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_runs_skips_an_unreadable_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = RunFolder(runs / "broken").create()
    broken.config.write_text("")
    broken.metrics.mkdir()
    assert main(["runs", str(runs), "--json"]) == 0
    told = capsys.readouterr()
    assert {row["name"] for row in json.loads(told.out)} == {"base", "warm"}
    assert "broken is skipped" in told.err


@pytest.mark.parametrize("seconds", ["-1", "0", "nan"])
def test_watch_refuses_an_interval_of_zero(runs: Path, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "base", "--runs-dir", str(runs), f"--every={seconds}"]) == 2
    assert "--every" in capsys.readouterr().err


def test_runs_compare_counts_a_nan_loss_as_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, broken in (("whole", 0), ("broken", 31)):
        writer = Writer(tmp_path / name, seed=7)
        for step in range(1, 51):
            writer.step = step
            writer.metrics.append({**writer.line(), **({"loss": math.nan} if 0 < broken <= step else {})})
    assert main(["runs", "compare", "whole", "broken", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "identical" not in out
    assert "curves: first differ at step 31" in out
    assert "one loss is not finite at 20 of 50 steps" in out
    assert main(["runs", "compare", "whole", "broken", "--runs-dir", str(tmp_path), "--json"]) == 0
    curves = json.loads(capsys.readouterr().out)["curves"]
    assert (curves["identical"], curves["common_steps"], curves["first_difference_step"]) == (False, 50, 31)


@pytest.mark.parametrize("words", [["compare", "a"], ["logs"], ["dashboards"], ["a", "b"], ["compare", "base", "bse"]])
def test_runs_answers_mistakes_with_a_hint(runs: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", *words, "--runs-dir", str(runs)]) == 2
    assert " hint: " in capsys.readouterr().err


def test_watch_prints_once_without_a_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(runs / "warm")]) == 0
    out, err = capsys.readouterr()
    for part in ("finished  warm  step 400 of 400", "lost if killed now", "goodput", "wall clock", "┤", "fault"):
        assert part in out
    assert max(map(len, out.splitlines())) < 100
    assert "next: keepstep report" in err
    assert main(["watch", "warm", "--runs-dir", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_watch_prints_once_on_a_dumb_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert main(["watch", str(runs / "warm")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["30", "60", "200"])
def test_watch_fits_any_width(
    runs: Path, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["watch", str(runs / "base")]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[1:])) < int(columns)


@pytest.mark.slow
def test_report_is_one_html_file_without_scripts(runs: Path, tmp_path: Path) -> None:
    (runs / "base" / "config.yaml").write_text("name: <script>alert(1)</script>\n")
    page = tmp_path / "out" / "base.html"
    assert main(["report", str(runs / "base"), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 6
    for part in ("Predicted, then measured", "Goodput by cause", "worker killed by SIGKILL (rank 3)", "H200"):
        assert part in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"""(src|href)=["']?https?:""", text)


def test_report_in_markdown_has_text_plots(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "warm"), "-o", "-"]) == 0
    text = capsys.readouterr().out
    assert "## Goodput by cause" in text
    assert "| lost | steps that were done and then rolled back |" in text
    assert "┤" in text
    assert main(["report", str(runs / "warm"), "-o", "x.pdf"]) == 2


def test_runs_logs_merges_ranks_below_the_first_error(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_runs_dashboards_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "dashboards", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gpus.json", "job.json", "nodes.json", "rules.yaml", "storage.json",
    ]  # fmt: skip


def test_ui_refuses_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "/nowhere"]) == 2
    assert main(["ui", "/tmp", "--host", "0.0.0.0"]) == 2
    assert "there is no token" in capsys.readouterr().err


def test_ui_refuses_a_token_that_the_process_list_shows(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEEPSTEP_UI_TOKEN", raising=False)
    assert main(["ui", str(runs), "--port", "70000", "--token", "a-secret-of-many-characters"]) == 2
    refused = capsys.readouterr().err
    assert "visible to every user" in refused
    assert "KEEPSTEP_UI_TOKEN" in refused
    assert "a-secret-of-many-characters" not in refused
    monkeypatch.setenv("KEEPSTEP_UI_TOKEN", "short")
    assert main(["ui", str(runs), "--port", "0"]) == 2
    assert "the token has 5 characters" in capsys.readouterr().err, "it is read from the environment"


@pytest.mark.slow
def test_ui_stops_with_its_parent(runs: Path) -> None:
    words = [sys.executable, "-m", "keepstep", "ui", str(runs / "base"), "--port", "0", "--until-stdin-closes"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdin
        server.stdout.readline()
        link = server.stdout.readline().split()[1]
        assert link.endswith("#run=base")
        with urllib.request.urlopen(link.partition("#")[0] + "api/runs", timeout=PATIENCE_S) as answer:
            assert len(json.load(answer)["runs"]) == 2
        server.stdin.close()
        assert server.wait(PATIENCE_S) == 0


def test_ui_link_carries_any_run_name(runs: Path) -> None:
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
def test_train_ui_serves_the_page_until_the_run_ends(tmp_path: Path) -> None:
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
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with urllib.request.urlopen(page + "api/runs", timeout=PATIENCE_S) as answer:
                if any(row["name"] == "tiny" and row["step"] > 5 for row in json.load(answer)["runs"]):
                    break
            time.sleep(0.5)
        else:
            pytest.fail("no step was seen on the page")
        train.terminate()
        train.stderr.read()
        assert train.wait(PATIENCE_S) == 75, "saved and stopped on request"
    end = time.monotonic() + PATIENCE_S
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
def test_observing_page_commands_run(runs: Path, tmp_path: Path) -> None:
    commands = commands_in_the_docs()
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[0] == "keepstep"
        if words[1] in ("ui", "train"):
            # These run until they are stopped: only the parsing of their words can be tested here.
            code = "import sys; from keepstep.cli.main import load_verb;"
            code += f"load_verb({words[1]!r})[1].parse_args(sys.argv[1:])"
            call = [sys.executable, "-c", code, *words[2:]]
        else:
            call = [sys.executable, "-m", "keepstep", *words[1:]]
        done = subprocess.run(
            call, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
