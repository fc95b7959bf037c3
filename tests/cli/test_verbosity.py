"""`-q` and `-v` of every verb: what is printed on stderr, also by the processes that a command starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli.main import VERBS, load_verb, main
from keepstep.core.verbosity import VARIABLE

Captured = pytest.CaptureFixture[str]

TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
    "global_batch=4", "microbatch=2", "max_duration=2ba", "schedule.warmup=5ba", "evaluate.batches=1",
    "observe.tensorboard=false", "compute.threads=1", "compute.device=cpu",
]  # fmt: skip


@pytest.mark.slow
def test_quiet_run_of_two_processes_prints_warnings_only(tmp_path: Path) -> None:
    words = ["train", *TINY, f"runs_dir={tmp_path}", "--procs", "2", "-q"]
    done = subprocess.run([sys.executable, "-m", "keepstep", *words], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"done: {tmp_path}/run\n"), done.stderr
    lines = done.stderr.splitlines()
    assert any("schedule.warmup (5ba) is longer than the run" in line for line in lines)
    assert all(line.startswith(("notice: ", "warning: ", " hint: ")) for line in lines), lines


def test_verbose_run_prints_details_and_keeps_them(tmp_path: Path, capsys: Captured) -> None:
    words = ["train", *TINY, f"runs_dir={tmp_path}", "--procs", "1", "resilience.max_restarts=0"]
    assert main([*words, "-v"]) == 0
    text = capsys.readouterr().err
    assert "step 2/2" in text, "progress is printed as before"
    assert "set in it or by overrides: model.layers" in text
    assert "event finish: {'step': 2}" in text
    logs = "".join(path.read_text() for path in (tmp_path / "run/logs").glob("*.jsonl"))
    assert "event finish: {'step': 2}" in logs


@pytest.mark.parametrize(
    "words", [["-q", "config", "check"], ["config", "-q", "check"], ["config", "check", "--quiet"]]
)
def test_quiet_leaves_out_next_steps(words: list[str], capsys: Captured) -> None:
    assert main([*words, "model=mpt-125m"]) == 0
    quiet = capsys.readouterr()
    assert main(["config", "check", "model=mpt-125m"]) == 0
    normal = capsys.readouterr()
    assert quiet.out == normal.out
    assert (quiet.err, normal.err[:6]) == ("", "next: ")
    assert VARIABLE not in os.environ, "the next command is not quiet"


def test_verbose_error_has_its_traceback(capsys: Captured) -> None:
    assert main(["plan", "model=mpt-125m", "--cluster", "h100:0", "-v"]) == 2
    text = capsys.readouterr().err
    assert "in find_cluster" in text
    assert text.splitlines()[-1].startswith(" hint: ")
    assert main(["plan", "model=mpt-125m", "--cluster", "h100:0"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_quiet_and_verbose_together_are_refused(capsys: Captured) -> None:
    assert main(["models", "-q", "-v"]) == 2
    assert "-v/--verbose: not allowed with argument -q/--quiet" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_quiet_and_verbose(verb: str) -> None:
    parser = load_verb(verb)[1]
    for each in [parser, *parser.actions.values()]:
        assert {"-q", "--quiet", "-v", "--verbose"} <= set(each.options())


@pytest.mark.parametrize(
    "words",
    [["demo", "--runs-dir", "{runs}"], ["chaos", "data=demo", "runs_dir={runs}"], ["train", "data=demo"],
     ["finetune", "data=demo"], ["bench", "step"], ["import", "nowhere"]],
)  # fmt: skip
def test_name_must_be_safe_for_every_verb(words: list[str], tmp_path: Path, capsys: Captured) -> None:
    given = [word.format(runs=tmp_path) for word in words]
    assert main([*given, "--name", "a b/c"]) == 2
    assert "must be one safe folder name" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["demo", "--runs-dir", "{runs}"], ["chaos", "data=demo", "runs_dir={runs}"]])
def test_name_of_an_existing_run_is_refused(words: list[str], tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine").mkdir()
    assert main([*(word.format(runs=tmp_path) for word in words), "--name", "mine"]) == 2
    assert f"error: {tmp_path}/mine already exists\n hint: choose another --name" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_keeps_its_name_in_the_json(tmp_path: Path, capsys: Captured) -> None:
    words = ["bench", "storage", "--data", f"disk={tmp_path}", "--checkpoints", f"disk={tmp_path}", "--size", "1MiB"]
    out = tmp_path / "out.json"
    assert main([*words, "--writers", "1", "--name", "mine", "--out", str(out), "-q"]) == 0
    assert '"name": "mine"' in out.read_text()
    assert capsys.readouterr().err == ""
