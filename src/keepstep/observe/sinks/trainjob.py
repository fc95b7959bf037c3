"""Progress in `status.trainerStatus` of a TrainJob (Kubeflow Trainer 2.2 or newer, feature gate TrainJobStatus).

The controller sets three variables in the pods: an address, and the files of its CA and of a token for this TrainJob.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep.observe.history import History
from keepstep.observe.run_folder import Record, RunFolder, is_validation, number
from keepstep.observe.verdict import total_steps

URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
CA_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"
INTERVAL_S = 5.0
"""The shortest time between two requests that Trainer asks its clients for."""
REQUEST_TIMEOUT_S = 5.0
_SMOOTHING = 0.9
_METRICS = ("step", "loss", "valid_loss", "lr", "grad_norm", "tokens_per_s", "mfu")


class TrainJobSink:
    """Sends the newest metrics to the controller, at most every `INTERVAL_S` seconds and once at the end."""

    name = "TrainJob status"

    def __init__(self, folder: RunFolder) -> None:
        self._url = urlsplit(os.environ[URL_VARIABLE])
        self._ca, self._token = os.environ[CA_VARIABLE], Path(os.environ[TOKEN_VARIABLE])
        self._history = History(folder)
        self._total_steps = 0
        self._step_s = math.nan
        self._newest: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._sent_at = -math.inf

    def write(self, stream: str, record: Record) -> None:
        """Take the metrics of a step or a validation."""
        if stream != "metrics":
            return
        self._newest |= {name: number(record[name]) for name in _METRICS if record.get(name) is not None}
        if not is_validation(record):
            step_s = number(record.get("step_s"))
            before = step_s if math.isnan(self._step_s) else self._step_s
            self._step_s = _SMOOTHING * before + (1 - _SMOOTHING) * step_s
        if time.monotonic() - self._sent_at >= INTERVAL_S:
            self._send()

    def close(self) -> None:
        """Send the last metrics, if the controller does not have them."""
        if self._newest != self._sent:
            self._send()

    def status(self) -> dict[str, Any]:
        """The body of a request, as Trainer's UpdateTrainJobStatusRequest defines it."""
        self._total_steps = self._total_steps or total_steps(self._history)
        metrics = [{"name": name, "value": f"{value:.8g}"} for name, value in self._newest.items()]
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat(), "metrics": metrics}
        if self._total_steps:
            left = max(0.0, self._total_steps - self._newest.get("step", 0.0))
            status["progressPercentage"] = int(100 * (1 - left / self._total_steps))
            if not math.isnan(self._step_s):
                status["estimatedRemainingSeconds"] = round(left * self._step_s)
        return {"trainerStatus": status}

    def _send(self) -> None:
        self._sent_at, self._sent = time.monotonic(), dict(self._newest)
        # Without proxies and redirects: the token is for the controller only. It changes, so it is read each time.
        context = ssl.create_default_context(cafile=self._ca)
        host, port = self._url.hostname or "", self._url.port
        connection = http.client.HTTPSConnection(host, port, timeout=REQUEST_TIMEOUT_S, context=context)
        token = self._token.read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", self._url.path, json.dumps(self.status()), headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"the controller answered {answer.status}: {answer.read(500).decode(errors='replace')}")
        finally:
            connection.close()
