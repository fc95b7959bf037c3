"""Progress of a TrainJob, sent to a server that stands for Kubeflow Trainer's controller."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.schema import ObserveConfig
from keepstep.core.ranks import Ranks
from keepstep.observe.run_folder import RunFolder
from keepstep.observe.sinks import trainjob
from keepstep.observe.sinks.metric_sinks import build_sinks
from keepstep.observe.sinks.trainjob import CA_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE, TrainJobSink
from tests.patience import PATIENCE_S

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/my-run/status"


class Controller(ThreadingHTTPServer):
    """Takes status requests over TLS."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.answer = 200


class Handler(BaseHTTPRequestHandler):
    """Writes every request down."""

    server: Controller

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, key = tmp_path / "ca.crt", tmp_path / "ca.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=trainer", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    (tmp_path / "token").write_text("first\n")
    server = Controller(certificate, key)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(URL_VARIABLE, f"https://127.0.0.1:{server.server_address[1]}{PATH}")
    monkeypatch.setenv(CA_VARIABLE, str(certificate))
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    # A proxy of the environment must not see the token.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    yield server
    server.shutdown()
    server.server_close()


def run_folder(root: Path) -> RunFolder:
    folder = RunFolder(root / "run").create()
    folder.facts.write_text('{"total_steps": 200}')
    return folder


def test_trainjob_status_follows_the_run(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob, "INTERVAL_S", 1e9)
    sinks = build_sinks(run_folder(tmp_path), ObserveConfig(tensorboard=False), Ranks())
    assert sinks is not None
    for step in (1, 2, 50):
        sinks.metrics({"step": step, "loss": 4.25, "lr": 1e-4, "step_s": 2.0})
    sinks.metrics({"step": 50, "valid_loss": 4.5})
    assert sinks.close(PATIENCE_S)
    # The first at once, the newest at the end, and nothing within the interval.
    (path, authorization, first), (_, _, last) = controller.requests
    assert (path, authorization) == (PATH, "Bearer first")
    assert first["trainerStatus"]["progressPercentage"] == 0
    status = last["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (25, 300)
    values = {metric["name"]: metric["value"] for metric in status["metrics"]}
    assert values == {"step": "50", "loss": "4.25", "lr": "0.0001", "valid_loss": "4.5"}


def test_trainjob_status_fits_the_model_of_trainer(controller: Controller, tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    sink = TrainJobSink(run_folder(tmp_path))
    for loss in (2.0, "NaN"):
        sink.write("metrics", {"step": 200, "loss": loss, "step_s": 1.0})
        body = sink.status()
        read = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).to_dict()
        assert read["trainerStatus"].keys() == body["trainerStatus"].keys()
        assert read["trainerStatus"]["metrics"] == body["trainerStatus"]["metrics"]
        assert body["trainerStatus"]["progressPercentage"] == 100


def test_trainjob_token_is_read_again(controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob, "INTERVAL_S", 0.0)
    sink = TrainJobSink(run_folder(tmp_path))
    sink.write("metrics", {"step": 1, "loss": 2.0, "step_s": 1.0})
    (tmp_path / "token").write_text("second")
    sink.write("metrics", {"step": 2, "loss": 2.0, "step_s": 1.0})
    assert [authorization for _, authorization, _ in controller.requests] == ["Bearer first", "Bearer second"]


def test_trainjob_refusal_does_not_stop_the_run(
    controller: Controller, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controller.answer = 403
    sinks = build_sinks(run_folder(tmp_path), ObserveConfig(tensorboard=False), Ranks())
    assert sinks is not None
    sinks.metrics({"step": 1, "loss": 2.0, "step_s": 1.0})
    assert sinks.close(PATIENCE_S)
    assert "TrainJob status failed (1 times so far): OSError: the controller answered 403" in capsys.readouterr().err
    assert sinks.failed["TrainJob status"] == 1


def test_trainjob_status_comes_from_the_first_rank_only(controller: Controller, tmp_path: Path) -> None:
    assert build_sinks(run_folder(tmp_path), ObserveConfig(), Ranks(rank=1, world_size=2)) is None
