"""Experiment trackers with the real packages where they are installed; without them a run only says so."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepstep.config.schema import ObserveConfig
from keepstep.core.ranks import Ranks
from keepstep.observe.folder import JsonLines, RunFolder
from keepstep.observe.sinks import JsonlSink, Sinks, build_sinks


def test_a_package_that_is_missing_costs_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    options = ObserveConfig(tensorboard=False, wandb_project="p", mlflow_experiment="e")
    sinks = build_sinks(RunFolder(tmp_path / "run"), options, Ranks())
    assert sinks is not None
    sinks.metrics({"step": 1, "loss": 2.0})
    assert sinks.close()
    told = capsys.readouterr().err
    assert "no Weights & Biases: the package wandb is missing (pip install wandb)" in told
    assert "no MLflow: the package mlflow is missing" in told
    assert len(JsonLines(RunFolder(tmp_path / "run").metrics).read()) == 1


def test_a_server_that_does_not_answer_holds_up_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package asks again for minutes when a run opens; so long nothing trained, after each restart anew."""
    answers, logged = threading.Event(), list[int]()

    class Client:
        def get_experiment_by_name(self, _name: str) -> SimpleNamespace:
            assert answers.wait(60)
            return SimpleNamespace(experiment_id="1")

        def create_run(self, _place: str, run_name: str) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

        def log_batch(self, _identity: str, metrics: list[tuple[str, float, int, int]]) -> None:
            logged.append(metrics[0][3])

        def set_terminated(self, _identity: str) -> None:
            """Nothing to do."""

    modules = sys.modules
    monkeypatch.setitem(modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(modules, "mlflow.entities", SimpleNamespace(Metric=lambda *values: values))
    options = ObserveConfig(tensorboard=False, mlflow_experiment="e")
    sinks = build_sinks(RunFolder(tmp_path / "run").create(), options, Ranks())
    assert sinks is not None
    assert not answers.is_set(), "it starts before the server has answered"
    for step in (1, 2, 3):
        sinks.metrics({"step": step, "loss": 2.0})
    answers.set()
    assert sinks.close()
    assert logged == [1, 2, 3], "what came in the meantime is not lost"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_takes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from keepstep.observe.trackers import WandbSink

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path / "run").create()
    sinks = Sinks([WandbSink(folder, "project", {"lr": 1e-3})])
    for step in (1, 2, 2, 3):
        sinks.metrics({"step": step, "loss": 3.0 - step, "sources": {"c4": 1}})
    sinks.event("finish", step=3)
    assert sinks.close(timeout_s=60)
    assert sinks.failed == {"Weights & Biases": 0}
    assert [*folder.root.glob("wandb/offline-run-*/*.wandb")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_metrics_and_a_resumed_run_goes_on_in_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    from keepstep.observe.trackers import MlflowSink

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "tracking").as_uri())
    folder = RunFolder(tmp_path / "run").create()
    for first in (1, 3):
        sinks = Sinks([MlflowSink(folder, "experiment", {"lr": 1e-3 * first})])
        for step in (first, first + 1):
            sinks.metrics({"step": step, "loss": 3.0 - step})
        assert sinks.close(timeout_s=60)
        assert sinks.failed == {"MLflow": 0}
    identity = (folder.root / "mlflow_run_id").read_text().strip()
    assert [point.step for point in mlflow.MlflowClient().get_metric_history(identity, "loss")] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dead_endpoint_neither_stops_nor_slows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from keepstep.observe.trackers import MlflowSink

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "tracking").as_uri())
    folder, told = RunFolder(tmp_path / "run").create(), list[str]()
    sink = MlflowSink(folder, "experiment", {})
    # The server dies after the start: from now on each request meets a closed port and its retries.
    sink._client = mlflow.MlflowClient("http://127.0.0.1:1")
    sinks = Sinks([sink, JsonlSink(folder)], notice=told.append)
    started = time.monotonic()
    for step in range(200):
        sinks.metrics({"step": step, "loss": 1.0})
    assert time.monotonic() - started < 1
    sinks.close(timeout_s=2)
    assert len(JsonLines(folder.metrics).read()) == 200
    assert any("left behind" in text or "fails" in text for text in told)
