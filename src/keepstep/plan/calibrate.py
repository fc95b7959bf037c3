"""Learn from measured runs: factors that bring predicted step times to what this kind of device really does.

A file of runs is JSON: one object, a list of them, or `{"runs": [...]}`, each as `keepstep bench step --json` writes
it: model, seq_len, microbatch, recompute, precision, device, step_s or tokens_per_s, and peak_memory_gib.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

from keepstep.config.presets import PRESETS, preset_fields
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import DataError
from keepstep.plan.cluster import Cluster, Gpu, read_profiles
from keepstep.plan.memory import plan_memory
from keepstep.plan.speed import Factors, plan_speed
from keepstep.plan.workload import Degrees, Workload

_NEEDED = ("model", "seq_len", "microbatch", "recompute", "precision", "device")
_PRIOR = 0.3
"""How strongly factors hold together: with few runs they move as one, with many each finds its own."""


@dataclass(frozen=True)
class Measured:
    """One run on one device, and what it was."""

    work: Workload
    device: str
    step_s: float
    peak_memory_gib: float | None
    matmul_s: float | None = None
    """Device seconds of a step in products and in attention, where the run was profiled."""
    attention_s: float | None = None
    memory_s: float | None = None
    """The same in all else, where that is known and no other process was waited for."""


@dataclass(frozen=True)
class Agreement:
    """Prediction beside measurement."""

    measured: Measured
    predicted_step_s: float
    predicted_memory_gib: float

    @property
    def step_error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_step_s / self.measured.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same for peak memory; None where it was not measured."""
        peak = self.measured.peak_memory_gib
        return self.predicted_memory_gib / peak - 1 if peak else None


def read_runs(path: Path) -> list[Measured]:
    """The runs of a file; a DataError names what is wrong."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}", "keepstep bench step --json writes one") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    entries = raw.get("runs", [raw]) if isinstance(raw, Mapping) else raw
    if not isinstance(entries, list):
        raise DataError(f"{path} must hold one run or a list of runs", "keepstep bench step --json writes one")
    return [measured_run(entry, f"{path}[{number}]") for number, entry in enumerate(entries)]


def measured_run(entry: Any, where: str = "run") -> Measured:
    """One run from its JSON object."""
    if not isinstance(entry, Mapping):
        raise DataError(f"{where} must be an object, not {entry!r}")
    missing = [key for key in _NEEDED if key not in entry]
    if not (entry.get("step_s") or entry.get("tokens_per_s")):
        missing.append("step_s")
    if missing:
        raise DataError(f"{where} lacks {', '.join(missing)}", "keepstep bench step --json writes all of them")
    work = Workload(
        model=_model(entry["model"], int(entry["seq_len"]), where),
        degrees=Degrees(shard=int(entry.get("world_size", 1))),
        global_batch=int(entry.get("global_batch", int(entry["microbatch"]) * int(entry.get("world_size", 1)))),
        microbatch=int(entry["microbatch"]),
        # A GPU's `auto` is bf16 on every device that a profile describes.
        precision="bf16" if entry["precision"] == "auto" else entry["precision"],
        recompute=entry["recompute"],
        compiled=bool(entry.get("compile", False)),
        joined_products=bool(entry.get("joined_products", True)),
        loss_chunks=int(entry.get("loss_chunks", 0)),
    )
    step_s = entry.get("step_s") or work.tokens_per_step / float(entry["tokens_per_s"])
    peak = entry.get("peak_memory_gib")
    kernels = entry.get("breakdown") or {}
    rest = kernels.keys() - {"matmul", "attention"}
    return Measured(
        replace(work, device_bytes=_device_bytes(str(entry["device"]))),
        str(entry["device"]),
        float(step_s),
        None if peak is None else float(peak),
        kernels.get("matmul"),
        kernels.get("attention"),
        sum(kernels[kind] for kind in rest) if rest and work.degrees.world_size == 1 else None,
    )


def _device_bytes(device: str) -> int:
    """Memory of a device that a profile knows by name, else a common size."""
    known = [gpu for gpu in read_profiles().gpus.values() if same_device(device, gpu)]
    return int(known[0].memory_gib * 2**30) if known else 80 * 2**30


def same_device(device: str, gpu: Gpu) -> bool:
    """Whether a run's device (`NVIDIA H200`) is this GPU (`h200`, `a100-80`)."""
    name, _, memory = gpu.name.partition("-")
    return name.lower() in device.lower() and (not memory or f"{memory}gb" in device.lower().replace(" ", ""))


def calibrate(runs: Iterable[Measured], cluster: Cluster) -> Factors:
    """Factors that fit the runs made on the cluster's GPU; all 1 where there are none."""
    usable = [run for run in runs if same_device(run.device, cluster.gpu)]
    if not usable:
        return Factors()
    parts = [_parts(run, cluster) for run in usable]
    rows = [[part / run.step_s for part in each] for run, each in zip(usable, parts, strict=True)]
    priors = [
        _mean_ratio([_kernels(run)[place] for run in usable], [each[place] for each in parts]) for place in range(3)
    ]
    common = _mean_ratio([run.step_s for run in usable], [sum(each) for each in parts])
    matmul, attention, memory = _ridge(rows, [prior or common for prior in priors])
    return Factors(matmul=matmul, attention=attention, memory=memory)


def agreement(runs: Iterable[Measured], cluster: Cluster, factors: Factors) -> list[Agreement]:
    """Each run of the cluster's GPU beside its prediction."""
    lines = []
    for run in runs:
        if same_device(run.device, cluster.gpu):
            step_s = plan_speed(run.work, cluster, factors).step.total_s
            lines.append(Agreement(run, step_s, plan_memory(run.work).allocated / 2**30))
    return lines


def _model(name: str, seq_len: int, where: str) -> ModelConfig:
    if name not in PRESETS:
        raise DataError(f"{where}: model is {name!r}, which is not a preset", "keepstep models lists them")
    given = {"seq_len": seq_len}
    return ModelConfig(preset=name, **preset_fields(name, given) | given)


def _parts(run: Measured, cluster: Cluster) -> list[float]:
    step = plan_speed(run.work, cluster).step
    # What is neither product nor attention scales with the memory's rate or with neither: one factor for both.
    return [step.matmul_s, step.attention_s, step.total_s - step.matmul_s - step.attention_s]


def _kernels(run: Measured) -> list[float | None]:
    """The measured counterpart of `_parts`, where the profiler has told."""
    if run.matmul_s is None or run.attention_s is None:
        return [None, None, None]
    if run.memory_s is None:
        return [run.matmul_s, run.attention_s, run.step_s - run.matmul_s - run.attention_s]
    # A profiled step is not the median one, and there is time between kernels: both belong to all of them alike.
    stretch = run.step_s / (run.matmul_s + run.attention_s + run.memory_s)
    return [part * stretch for part in (run.matmul_s, run.attention_s, run.memory_s)]


def _mean_ratio(measured: Sequence[float | None], predicted: Sequence[float]) -> float:
    """Geometric mean of measured over predicted where both are there; 0 where none is."""
    ratios = [value / guess for value, guess in zip(measured, predicted, strict=True) if value and value > 0]
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else 0.0


def _ridge(rows: Sequence[Sequence[float]], priors: Sequence[float]) -> list[float]:
    """The x near the priors that brings every row·x near 1; never below a third of its prior."""
    places = range(len(priors))
    matrix = [[sum(row[i] * row[j] for row in rows) + (_PRIOR if i == j else 0.0) for j in places] for i in places]
    right = [sum(row[i] for row in rows) + _PRIOR * priors[i] for i in places]
    return [max(each, prior / 3) for each, prior in zip(_solve(matrix, right), priors, strict=True)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the ridge keeps the diagonal away from zero."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            share = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [b - share * p for b, p in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][later] * solution[later] for later in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
