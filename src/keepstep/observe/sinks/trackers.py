"""TensorBoard, Weights & Biases and MLflow as sinks. A missing package costs a notice.

TensorBoard gets every value under the tags of LLM Foundry and of Megatron-LM, so that saved layouts of either keep
working. Its event files are written without torch.
"""

from __future__ import annotations

import errno
import io
import itertools
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.core.files import write_atomic
from keepstep.observe.run_folder import Record, RunFolder, is_validation, number

FOUNDRY_TAGS: Mapping[str, str] = {
    "loss": "loss/train/total",
    "ppl": "metrics/train/LanguagePerplexity",
    "valid_loss": "metrics/eval/LanguageCrossEntropy",
    "valid_ppl": "metrics/eval/LanguagePerplexity",
    "grad_norm": "l2_norm/grad/global",
    "lr": "lr-DecoupledAdamW/group0",
    "tokens": "time/token",
    "samples": "time/sample",
    "tokens_per_s": "throughput/tokens_per_sec",
    "tokens_per_s_device": "throughput/device/tokens_per_sec",
    "samples_per_s": "throughput/samples_per_sec",
    "steps_per_s": "throughput/batches_per_sec",
    "mfu": "throughput/device/mfu",
    "memory_gib": "memory/peak_reserved_mem",
}
"""The metric's name here and its tag in Composer, which LLM Foundry logs through."""

MEGATRON_TAGS: Mapping[str, str] = {
    "loss": "lm loss",
    "valid_loss": "lm loss validation",
    "valid_ppl": "lm loss validation ppl",
    "grad_norm": "grad-norm",
    "lr": "learning-rate",
    "step_s": "iteration-time",
    "batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "ranks": "world-size",
}
"""The metric's name here and its tag in Megatron-LM."""

_NOT_LOGGED = ("step", "time", "sources")
_FILE_NUMBERS = itertools.count()
_BYTES_PER_GB = 2**30 / 1e9
"""Composer logs memory in GB of 10^9 bytes."""


def scalars(record: Record) -> dict[str, float]:
    """Tags and values of one metrics line; a metric without a known tag goes under `keepstep/`."""
    values = {name: number(value) for name, value in record.items() if name not in ("step", "time")}
    values = {name: value for name, value in values.items() if not math.isnan(value) or name == "loss"}
    values |= _derived(values)
    tagged: dict[str, float] = {}
    for name, value in values.items():
        known = [tags[name] for tags in (FOUNDRY_TAGS, MEGATRON_TAGS) if name in tags]
        for tag in known or [f"keepstep/{name}"]:
            tagged[tag] = value * _BYTES_PER_GB if tag.startswith("memory/") else value
    return tagged


def _derived(values: Mapping[str, float]) -> dict[str, float]:
    more: dict[str, float] = {}
    # Only the loss of next tokens has a perplexity; other objectives come with rewards.
    if "loss" in values and values["loss"] < 700 and not any(name.startswith("reward") for name in values):
        more["ppl"] = math.exp(values["loss"])
    if values.get("ranks") and "tokens_per_s" in values:
        more["tokens_per_s_device"] = values["tokens_per_s"] / values["ranks"]
    if step_s := values.get("step_s"):
        more["steps_per_s"] = 1 / step_s
        if "batch_size" in values:
            more["samples_per_s"] = values["batch_size"] / step_s
    return more


class TensorBoardSink:
    """Scalars, events and samples for TensorBoard. Raises ImportError if the package is missing."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2

        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILE_NUMBERS)}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / name).open("wb", buffering=0)
        self._header = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._newest_step: int | None = None

    def write(self, stream: str, record: Record) -> None:
        """Write all scalars of a metrics line as one event, or a text."""
        step = int(record.get("step") or 0)
        if stream == "metrics":
            if not is_validation(record):
                self._drop_rolled_back(step, float(record["time"]))
            value = self._summary.Summary.Value
            values = [value(tag=tag, simple_value=scalar) for tag, scalar in scalars(record).items()]
        elif stream == "event":
            facts = ", ".join(f"{key} {item}" for key, item in record.items() if key not in ("time", "kind", "step"))
            values = [self._text("events", f"**{record.get('kind')}** at step {step}: {facts}")]
        elif stream == "sample":
            values = [self._text("samples", f"{record.get('prompt', '')}**{record.get('text', '')}**")]
        else:
            return
        summary = self._summary.Summary(value=values)
        self._append(self._event.Event(wall_time=float(record["time"]), step=step, summary=summary))

    def _drop_rolled_back(self, step: int, moment: float) -> None:
        """Tell TensorBoard to drop the steps from `step` on: a resumed or rolled-back run writes them again."""
        if self._newest_step is None or step <= self._newest_step:
            session_start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._append(self._event.Event(wall_time=moment, step=step, session_log=session_start))
        self._newest_step = step

    def _text(self, tag: str, text: str) -> Any:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"),
            data_class=self._summary.DATA_CLASS_TENSOR,
        )
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        return self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _append(self, event: Any) -> None:
        """Write one event, or nothing: half a record would end the file for its readers.

        On a full disk TensorBoard's own writer prints a traceback and stops for good.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        start, records = self._file.tell(), io.BytesIO()
        for each in (event,) if start else (self._header, event):
            RecordWriter(records).write(each.SerializeToString())
        try:
            written = self._file.write(records.getbuffer())
            if written != len(records.getbuffer()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.seek(start)
            self._file.truncate()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _numbers(record: Record) -> dict[str, float]:
    return {name: number(value) for name, value in record.items() if name not in _NOT_LOGGED and value is not None}


class WandbSink:
    """Logs into a Weights & Biases project. Raises ImportError if `wandb` is missing.

    The run's id is its folder's name, so a resumed run continues the same chart. `WANDB_MODE=offline` writes to disk.
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
            # wandb drops steps that are not larger than the last one, which a run that rolled back logs again.
            # So the step is also a value of its own.
            self._run.log({**_numbers(record), "trainer/step": record["step"]}, step=int(record["step"]))
        elif stream == "event" and record.get("kind") in ("fault", "finish", "stop"):
            self._run.summary[f"event/{record['kind']}"] = record.get("step")

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """Logs into an MLflow experiment. Raises ImportError if `mlflow` is missing.

    The tracking server is `MLFLOW_TRACKING_URI`. The run folder stores the run's id, so a resumed run continues it.
    """

    name = "MLflow"

    def __init__(self, folder: RunFolder, experiment: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._client: Any = mlflow.MlflowClient()
        id_file = folder.root / "mlflow_run_id"
        if id_file.is_file():
            self._id = id_file.read_text().strip()
        else:
            self._id = self._new_run(experiment, folder.name, config)
            write_atomic(id_file, self._id + "\n")

    def _new_run(self, experiment: str, name: str, config: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id = str(self._client.create_run(experiment_id, run_name=name).info.run_id)
        # Only for a new run: MLflow rejects changed parameters, and a resumed run may have a longer duration.
        for key, value in config.items():
            self._client.log_param(run_id, key, str(value)[:500])
        return run_id

    def write(self, stream: str, record: Record) -> None:
        """Log a metrics line in one request."""
        if stream != "metrics":
            return
        from mlflow.entities import Metric

        moment, step = int(number(record.get("time")) * 1000), int(record["step"])
        metrics = [Metric(name, value, moment, step) for name, value in _numbers(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
