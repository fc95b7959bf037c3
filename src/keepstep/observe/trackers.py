"""Weights & Biases and MLflow as sinks. Neither is needed: a package that is missing costs a notice, nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.core.files import write_atomic
from keepstep.observe.folder import Record, RunFolder, number

_NOT_LOGGED = frozenset({"step", "time", "sources"})


def _scalars(record: Record) -> dict[str, float]:
    return {name: number(value) for name, value in record.items() if name not in _NOT_LOGGED and value is not None}


class WandbSink:
    """Logs into a Weights & Biases project. Raises ImportError when `wandb` is missing.

    The run's id is its folder's name, so a resumed run goes on in the same chart. `WANDB_MODE=offline` writes to disk.
    """

    name = "Weights & Biases"

    def __init__(self, folder: RunFolder, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project, id=folder.name, name=folder.name, dir=str(folder.root), config=dict(config), resume="allow"
        )

    def write(self, stream: str, record: Record) -> None:
        """Log a metrics line under its step; an event as an alert in the run's log."""
        if stream == "metrics":
            # A rewound run logs steps again: wandb drops steps that fall back, so the step is a value of its own too.
            self._run.log({**_scalars(record), "trainer/step": record["step"]}, step=int(record["step"]))
        elif stream == "event" and record.get("kind") in ("fault", "finish", "stop"):
            self._run.summary[f"event/{record['kind']}"] = record.get("step")

    def flush(self) -> None:
        """The package sends on its own."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """Logs into an MLflow experiment. Raises ImportError when `mlflow` is missing.

    The tracking server is `MLFLOW_TRACKING_URI`. The run's id is kept in the run folder: a resumed run goes on there.
    """

    name = "MLflow"

    def __init__(self, folder: RunFolder, experiment: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._client: Any = mlflow.MlflowClient()
        kept = folder.root / "mlflow_run_id"
        if kept.is_file():
            self._id = kept.read_text().strip()
        else:
            self._id = self._new_run(experiment, folder.name, config)
            write_atomic(kept, self._id + "\n")

    def _new_run(self, experiment: str, name: str, config: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        made = str(self._client.create_run(place, run_name=name).info.run_id)
        # Only now: MLflow refuses a parameter that changes, and a resumed run may well be longer than it was.
        for key, value in config.items():
            self._client.log_param(made, key, str(value)[:500])
        return made

    def write(self, stream: str, record: Record) -> None:
        """Log a metrics line in one request."""
        if stream != "metrics":
            return
        from mlflow.entities import Metric

        moment, step = int(number(record.get("time")) * 1000), int(record["step"])
        metrics = [Metric(name, value, moment, step) for name, value in _scalars(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def flush(self) -> None:
        """Every request is complete."""

    def close(self) -> None:
        """Mark the run as done."""
        self._client.set_terminated(self._id)
