"""TensorBoard event files, written without torch, under the names users of LLM Foundry and Megatron know.

Every value is written under both names, so a saved TensorBoard layout of either keeps working.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.observe.folder import Record, is_validation, number

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
"""A metric's name here, and Composer's (which LLM Foundry logs through)."""

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
"""A metric's name here, and Megatron-LM's."""

_NOT_SCALARS = frozenset({"step", "time"})
_BYTES_PER_GB = 2**30 / 1e9
"""Composer reports memory in GB of 10^9 bytes."""


def scalars(record: Record) -> dict[str, float]:
    """TensorBoard tags and values of one metrics line; a metric with no known name goes under `keepstep/`."""
    values = {name: number(value) for name, value in record.items() if name not in _NOT_SCALARS}
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
    if "loss" in values and values["loss"] < 700:
        more["ppl"] = math.exp(values["loss"])
    if values.get("ranks") and "tokens_per_s" in values:
        more["tokens_per_s_device"] = values["tokens_per_s"] / values["ranks"]
    if step_s := values.get("step_s"):
        more["steps_per_s"] = 1 / step_s
        if "batch_size" in values:
            more["samples_per_s"] = values["batch_size"] / step_s
    return more


class TensorBoardSink:
    """Scalars, events and samples as TensorBoard shows them. Raises ImportError when the package is missing."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        self._writer: Any = EventFileWriter(str(folder))
        self._newest_step: int | None = None

    def write(self, stream: str, record: Record) -> None:
        """One event with all scalars of a metrics line, or one text."""
        step = int(record.get("step") or 0)
        if stream == "metrics":
            if not is_validation(record):
                self._forget_undone(step, float(record["time"]))
            value = self._summary.Summary.Value
            values = [value(tag=tag, simple_value=scalar) for tag, scalar in scalars(record).items()]
        elif stream == "event":
            facts = ", ".join(f"{key} {item}" for key, item in record.items() if key not in ("time", "kind", "step"))
            values = [self._text("events", f"**{record.get('kind')}** at step {step}: {facts}")]
        elif stream == "sample":
            values = [self._text("samples", f"{record.get('prompt', '')}**{record.get('text', '')}**")]
        else:
            return
        event = self._event.Event(
            wall_time=float(record["time"]), step=step, summary=self._summary.Summary(value=values)
        )
        self._writer.add_event(event)

    def _forget_undone(self, step: int, moment: float) -> None:
        """Steps that this process, or one before it, did and went back from would else be drawn a second time."""
        if self._newest_step is None or step <= self._newest_step:
            begun = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=moment, step=step, session_log=begun))
        self._newest_step = step

    def _text(self, tag: str, text: str) -> Any:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"),
            data_class=self._summary.DATA_CLASS_TENSOR,
        )
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        return self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def flush(self) -> None:
        """Push events to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and stop the writer."""
        self._writer.close()
