"""Experiment trackers with the real packages where they are installed; without them a run only says so."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepstep.config.schema import ObserveConfig
from keepstep.core.ranks import Ranks
from keepstep.observe.run_folder import JsonLines, RunFolder
from keepstep.observe.sinks.metric_sinks import JsonlSink, MetricSinks, build_sinks
from tests.patience import PATIENCE_S


def test_trackers_missing_package_costs_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    options = ObserveConfig(tensorboard=False, wandb_project="p", mlflow_experiment="e")
    sinks = build_sinks(RunFolder(tmp_path / "run"), options, Ranks())
    assert sinks is not None
    sinks.metrics({"step": 1, "loss": 2.0})
    assert sinks.close(PATIENCE_S)
    told = capsys.readouterr().err
    assert "Weights & Biases is off: wandb is not installed (pip install wandb)" in told
    assert "MLflow is off: mlflow is not installed" in told
    assert len(JsonLines(RunFolder(tmp_path / "run").metrics).read()) == 1


def test_trackers_silent_server_does_not_delay_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package retries for minutes when a run opens; training waited for it, at each restart."""
    answers, logged = threading.Event(), list[int]()

    class Client:
        def get_experiment_by_name(self, _name: str) -> SimpleNamespace:
            assert answers.wait(PATIENCE_S)
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
    assert sinks.close(PATIENCE_S)
    assert logged == [1, 2, 3], "what came in the meantime is not lost"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_sink_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from keepstep.observe.sinks.trackers import WandbSink

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path / "run").create()
    sinks = MetricSinks([WandbSink(folder, "project", {"lr": 1e-3})])
    for step in (1, 2, 2, 3):
        sinks.metrics({"step": step, "loss": 3.0 - step, "sources": {"c4": 1}})
    sinks.event("finish", step=3)
    assert sinks.close(timeout_s=PATIENCE_S)
    assert sinks.failed == {"Weights & Biases": 0}
    assert [*folder.root.glob("wandb/offline-run-*/*.wandb")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_sink_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from keepstep.observe.sinks.trackers import MlflowSink

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "tracking").as_uri())
    folder = RunFolder(tmp_path / "run").create()
    for first in (1, 3):
        sinks = MetricSinks([MlflowSink(folder, "experiment", {"lr": 1e-3 * first})])
        for step in (first, first + 1):
            sinks.metrics({"step": step, "loss": 3.0 - step})
        assert sinks.close(timeout_s=PATIENCE_S)
        assert sinks.failed == {"MLflow": 0}
    identity = (folder.root / "mlflow_run_id").read_text().strip()
    assert [point.step for point in mlflow.MlflowClient().get_metric_history(identity, "loss")] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackers_dead_endpoint_does_not_slow_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from keepstep.observe.sinks.trackers import MlflowSink

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "tracking").as_uri())
    folder, told = RunFolder(tmp_path / "run").create(), list[str]()
    sink = MlflowSink(folder, "experiment", {})
    # The server dies after the start: from now on each request meets a closed port and its retries.
    sink._client = mlflow.MlflowClient("http://127.0.0.1:1")
    sinks = MetricSinks([sink, JsonlSink(folder)], notice=told.append)
    started_s = time.thread_time()
    for step in range(200):
        sinks.metrics({"step": step, "loss": 1.0})
    assert time.thread_time() - started_s < 1
    deadline_s = time.monotonic() + PATIENCE_S
    while len(JsonLines(folder.metrics).read()) < 200 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    sinks.close(timeout_s=2)
    assert len(JsonLines(folder.metrics).read()) == 200
    assert any("left behind" in text or "fails" in text for text in told)
