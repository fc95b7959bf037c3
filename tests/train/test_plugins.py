"""Plug-ins in runs: state in checkpoints, exact resume, errors before the first step, and the package of the page."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.core.callbacks import Callback
from keepstep.core.errors import ConfigError, KeepstepError
from keepstep.resilience.fault_injection import Fault, to_environment
from keepstep.train.trainer import train
from tests.doc_blocks import ROOT, blocks, commands
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import TINY, losses, run_here, run_processes

PAGE = "docs/plug-ins.md"
CALLS: list[tuple[str, int]] = []
SPARSE = ["model.linear=sparse", "model.linear_layers=[up, down]", "precision=fp32", "checkpoint.interval=0ba"]


class Recording(Callback):
    """Notes every call, and counts steps in its state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["loss"] > 0
        self.steps += 1
        CALLS.append(("step", self.steps))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["valid_loss"] > 0
        CALLS.append(("evaluation", step))

    def on_save(self, step: int, path: str) -> None:
        assert Path(path).is_dir(), path
        CALLS.append(("save", step))

    def on_fault(self, step: int, message: str) -> None:
        CALLS.append(("fault", step))

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.steps = int(str(state["steps"]))


class Failing(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise ZeroDivisionError("seven by nought")


@pytest.fixture
def wordplay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the page as a module on the path."""
    folder = tmp_path / "wordplay"
    folder.mkdir()
    (folder / "wordplay.py").write_text(blocks(PAGE, "python")[0])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return folder


def plugged(folder: Path) -> list[str]:
    callback = json.dumps({"wordplay:LossSum": {"file": str(folder / "sums.txt")}})
    return ["data=wordplay:Counting", "model.linear=wordplay:halved", f"observe.callbacks={callback}"]


def inject_nan(monkeypatch: pytest.MonkeyPatch, folder: Path, step: int) -> None:
    for name, value in to_environment([Fault("nan", step)], folder).items():
        monkeypatch.setenv(name, value)


def test_callbacks_are_called_and_their_state_is_restored(tmp_path: Path) -> None:
    CALLS.clear()
    name = f"observe.callbacks={{{__name__}:Recording: }}"
    run_here(tmp_path, name, "max_duration=3ba", "checkpoint.interval=2ba")
    assert [call for call in CALLS if call[0] == "step"] == [("step", 1), ("step", 2), ("step", 3)]
    assert [call for call in CALLS if call[0] == "save"] == [("save", 2), ("save", 3)]
    assert ("evaluation", 3) in CALLS
    run_here(tmp_path, name, "max_duration=4ba")
    assert ("step", 4) in CALLS


def test_callbacks_of_a_program_follow_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    inject_nan(monkeypatch, tmp_path, step=2)
    train(load_config(None, [*TINY, f"runs_dir={tmp_path}", "guard.nan=skip"]).config, [Recording()])
    assert ("fault", 2) in CALLS


def test_failing_callback_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(KeepstepError, match=r"Failing failed in on_step at step 2: ZeroDivisionError: seven by nought"):
        run_here(tmp_path, f"observe.callbacks={{{__name__}:Failing: {{at: 2}}}}")


@pytest.mark.slow
def test_stream_and_callback_resume_exactly(tmp_path: Path, wordplay: Path) -> None:
    first, second = tmp_path / "whole", tmp_path / "parts"
    first.mkdir()
    second.mkdir()
    run_here(first, *plugged(first), "max_duration=7ba")
    run_here(second, *plugged(second), "max_duration=7ba", "checkpoint.interval=3ba", "data.prefetch=9")
    checkpoints = sorted((second / "run" / "checkpoints").glob("step*"))
    assert len(checkpoints) == 3
    # As if the run had been killed after step 3: later checkpoints are gone.
    for folder in checkpoints[1:]:
        (folder / "_SUCCESS").unlink()
    run_here(second, *plugged(second), "max_duration=7ba", "data.prefetch=1")
    assert losses(second) == losses(first)
    sums = [(folder / "sums.txt").read_text().splitlines() for folder in (first, second)]
    assert sums[1][7:] == sums[0][3:]


def test_stream_goes_back_with_a_rollback(tmp_path: Path, wordplay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_nan(monkeypatch, tmp_path, step=4)
    run_here(tmp_path, *plugged(tmp_path), "guard.nan=rollback", "guard.keep_interval=2", "guard.recheck_interval=2")
    assert len(losses(tmp_path)) == 6


@pytest.mark.slow
def test_stream_has_equal_losses_on_one_and_two_processes(tmp_path: Path, wordplay: Path) -> None:
    words = [*plugged(tmp_path), "reproducible=elastic", "precision=fp32", "checkpoint.interval=3ba"]
    run_here(tmp_path, *words, "name=one")
    done = run_processes(tmp_path, 2, *words, "name=two", "max_duration=3ba")
    assert done.returncode == 0, done.stderr
    run_here(tmp_path, *words, "name=two")
    assert losses(tmp_path, "two") == losses(tmp_path, "one")


@pytest.fixture(scope="module")
def sparse_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("sparse")
    run_here(folder, *SPARSE)
    return losses(folder)


@pytest.mark.parametrize("word", ["compute.recompute=full", "compute.recompute=selective"])
@pytest.mark.slow
def test_linear_layers_work_with_recomputation(tmp_path: Path, sparse_losses: list[float], word: str) -> None:
    run_here(tmp_path, *SPARSE, word)
    assert losses(tmp_path) == sparse_losses


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "pipeline", "context"])
def test_linear_layers_work_in_parallel(tmp_path: Path, sparse_losses: list[float], axis: str) -> None:
    done = run_processes(tmp_path, 2, *SPARSE, f"parallel.{axis}=2")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(sparse_losses, rel=1e-4)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data=wordplay:Absent", "wordplay has no Absent"),
        ("data=wordplay:brief", "cannot be called as brief(seq_len=…, vocab=…, seed=…)"),
        ("data.options={stride: 2}", "is for plug-ins"),
        ("model.linear=wordplay:Counting", "cannot be called as Counting(in_features=…"),
        ("observe.callbacks={wordplay:LossSum: }", "missing a required argument: 'file'"),
        ("observe.callbacks={wordplay:brief: {messages: 1, answer: a, expected: 2}}", "which is no Callback"),
        (
            "observe.callbacks={lossum: }",
            "nothing of that name is installed in the entry point group keepstep.callbacks",
        ),
        ("observe.callbacks={wordplay:LossSum: 3}", "must have a mapping of options"),
    ],
)
def test_plugin_mistakes_end_before_the_first_step(tmp_path: Path, wordplay: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_here(tmp_path, word)
    assert any(message in line for line in raised.value.lines())
    assert any(line.startswith(" hint: ") for line in raised.value.lines())
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not losses(tmp_path)


@pytest.mark.slow
def test_plugin_mistake_has_exit_code_2_and_one_error(tmp_path: Path, wordplay: Path) -> None:
    done = run_processes(tmp_path, 2, "data=wordplay:brief")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("cannot be called as brief") == 1


@pytest.mark.parametrize("command", [line for line in commands(PAGE) if " config show" in line])
def test_plugins_page_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the page's package; keepstep and everything else come from the one of the tests."""
    folder = tmp_path_factory.mktemp("plugged")
    package = folder / "wordplay"
    package.mkdir()
    (package / "pyproject.toml").write_text(blocks(PAGE, "toml")[0])
    (package / "wordplay.py").write_text(blocks(PAGE, "python")[0])
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    # Without isolation the build uses the setuptools that is here, and downloads nothing.
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (site / "dependencies.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    install = [*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", str(package)]
    subprocess.run(install, check=True, cwd=folder)
    return folder / "env"


KILL_ONCE = """
import os, signal, time
from pathlib import Path
from keepstep.core.callbacks import Callback

class KillOnce(Callback):
    def on_step(self, step, metrics):
        if step == 13 and not Path("killed").exists():
            deadline = time.monotonic() + 600
            while not list(Path("runs").rglob("_SUCCESS")) and time.monotonic() < deadline:
                time.sleep(0.01)
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_installed_plugins_are_killed_and_resume_to_equal_losses(environment: Path, tmp_path: Path) -> None:
    train_page = next(shlex.split(line)[1:] for line in commands(PAGE) if " train " in line)
    (tmp_path / "kill_once.py").write_text(KILL_ONCE)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(name: str, *words: str) -> tuple[int, str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(blocks(PAGE, "yaml")[0])
        # Without an agent there is one process, and its death ends the run.
        command = [environment / "bin" / "python", "-m", "keepstep", *train_page, "resilience.max_restarts=0", *words]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stderr

    code, said = run("whole")
    assert code == 0, said
    code, said = run("parts", "observe.callbacks={kill_once:KillOnce: }")
    assert code == -signal.SIGKILL, said
    code, said = run("parts", "observe.callbacks={kill_once:KillOnce: }")
    assert code == 0, said
    assert "resumed at step" in said
    assert len(losses(tmp_path / "whole" / "runs", "plugged")) == 20
    assert losses(tmp_path / "parts" / "runs", "plugged") == losses(tmp_path / "whole" / "runs", "plugged")
    sums = [(tmp_path / name / "sums.txt").read_text().splitlines() for name in ("whole", "parts")]
    assert sums[1][-7:] == sums[0][-7:]
    assert set(sums[1]) == set(sums[0])
