"""Calibration: factors that fit predicted step times to measured runs on the same kind of device.

A file of runs is JSON: one object, a list, or `{"runs": [...]}`, as `keepstep bench step --json` writes them, with
model, seq_len, microbatch, recompute, precision, device, step_s or tokens_per_s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from math import exp, log
from pathlib import Path
from typing import Any

from keepstep.config.layout import Layout
from keepstep.config.presets import PRESETS, preset_fields
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import DataError
from keepstep.plan.cluster import CPU, Cluster, read_profiles
from keepstep.plan.speed import Factors, plan_speed
from keepstep.plan.workload import RECOMPUTE, Workload

_NEEDED = ("model", "seq_len", "microbatch", "recompute", "precision", "device")
_WAITS = 1.25
"""A run whose step takes this many times the time of its kernels waits for the host, and says nothing about kernels."""
_PRIOR = 0.3
"""Weight of the priors: with few runs all factors move together, with many each is fitted alone."""


@dataclass(frozen=True)
class Measured:
    """One measured run on one device."""

    work: Workload
    device: str
    step_s: float
    kernels_s: tuple[float, float, float] | None
    """Seconds of a step in matmuls, in attention and in all else, where the run was profiled."""
    busy_s: float = 0.0
    """Seconds of a step in kernels of one process, where all were profiled."""

    @property
    def waits_for_host(self) -> bool:
        """Whether the GPU waits for the host to start its kernels."""
        return 0 < _WAITS * self.busy_s < self.step_s


def read_runs(path: Path) -> list[Measured]:
    """The runs of a file; a DataError names what is wrong."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}", "keepstep bench step --json writes one") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", "keepstep bench step --json writes one") from None
    entries = raw.get("runs", [raw]) if isinstance(raw, Mapping) else raw
    if not isinstance(entries, list):
        raise DataError(f"{path} must hold one run or a list of runs", "keepstep bench step --json writes one")
    return [measured_run(entry, f"{path}[{number}]") for number, entry in enumerate(entries)]


def shipped_runs() -> list[Measured]:
    """Our own measured runs, which calibrate plans for those devices."""
    text = (resources.files("keepstep.plan") / "data" / "measured.json").read_text(encoding="utf-8")
    return [measured_run(entry, f"measured.json[{number}]") for number, entry in enumerate(json.loads(text)["runs"])]


def measured_run(entry: Any, where: str = "run") -> Measured:
    """One run from its JSON object."""
    if not isinstance(entry, Mapping):
        raise DataError(f"{where} must be an object, not {entry!r}", "keepstep bench step --json writes one")
    missing = [key for key in _NEEDED if key not in entry]
    if not (entry.get("step_s") or entry.get("tokens_per_s")):
        missing.append("step_s")
    if missing:
        raise DataError(f"{where} lacks {', '.join(missing)}", "keepstep bench step --json writes all of them")
    modes = [entry["recompute"], *entry.get("recompute_by_block", ())]
    if unknown := [mode for mode in modes if mode not in (*RECOMPUTE, "auto")]:
        raise DataError(
            f"{where} has recompute {unknown[0]!r}, which is none of {', '.join(RECOMPUTE)}", "measure again"
        )
    work = Workload(
        model=_model(entry["model"], int(entry["seq_len"]), where),
        degrees=Layout(shard=int(entry.get("world_size", 1))),
        global_batch=int(entry.get("global_batch", int(entry["microbatch"]) * int(entry.get("world_size", 1)))),
        microbatch=int(entry["microbatch"]),
        # `auto` is bf16 on every GPU that a profile describes.
        precision="bf16" if entry["precision"] == "auto" else entry["precision"],
        # Earlier files have `auto` also where nothing was recomputed, and do not tell.
        recompute="none" if entry["recompute"] == "auto" else entry["recompute"],
        recompute_by_block=tuple(entry.get("recompute_by_block", ())),
        full_saves_attention=bool(entry.get("full_saves_attention", True)),
        compile=bool(entry.get("compile", False)),
        fused_matmuls=bool(entry.get("joined_products", True)),
        loss_chunks=int(entry.get("loss_chunks", 0)),
    )
    step_s = float(entry.get("step_s") or work.tokens_per_step / float(entry["tokens_per_s"]))
    device = str(entry["device"])
    work = replace(work, device_bytes=_device_bytes(device))
    kernels, processes = entry.get("breakdown") or {}, work.degrees.world_size
    # With several processes the rest may be communication.
    busy_s = sum(kernels.values()) if processes == 1 and "other" in kernels else 0.0
    return Measured(work, device, step_s, _kernels_s(kernels, step_s, processes), busy_s)


def _kernels_s(kernels: Mapping[str, float], step_s: float, processes: int) -> tuple[float, float, float] | None:
    matmul, attention = kernels.get("matmul"), kernels.get("attention")
    if matmul is None or attention is None:
        return None
    rest = [seconds for kind, seconds in kernels.items() if kind not in ("matmul", "attention")]
    if not rest or processes > 1:
        return matmul, attention, step_s - matmul - attention
    # A profiled step is not the median one, and there are gaps between kernels: scale all parts alike.
    stretch = step_s / (matmul + attention + sum(rest))
    return matmul * stretch, attention * stretch, sum(rest) * stretch


def _device_bytes(device: str) -> int:
    """Memory of a device that a profile knows by name, else a common size."""
    known = [gpu for gpu in read_profiles().gpus.values() if gpu.is_named(device)]
    return int(known[0].memory_gib * 2**30) if known else 80 * 2**30


def calibrate(runs: Iterable[Measured], cluster: Cluster) -> Factors:
    """Factors that fit the runs made on the cluster's GPU; all 1 where there are none."""
    runs = [run for run in runs if cluster.gpu.is_named(run.device)]
    host_s = 0.0 if cluster.gpu.name == CPU else _host_s(runs) or _host_s(shipped_runs())
    usable = [run for run in runs if not run.waits_for_host]
    if not usable:
        return Factors(host_s=host_s)
    parts = [_parts(run, cluster) for run in usable]
    rows = [[part / run.step_s for part in each] for run, each in zip(usable, parts, strict=True)]
    profiled = [(run.kernels_s, each) for run, each in zip(usable, parts, strict=True) if run.kernels_s]
    priors = [_mean_ratio((kernels[place], each[place]) for kernels, each in profiled) for place in range(3)]
    common = _mean_ratio((run.step_s, sum(each)) for run, each in zip(usable, parts, strict=True))
    matmul, attention, memory = _ridge(rows, [prior or common for prior in priors])
    return Factors(matmul=matmul, attention=attention, memory=memory, host_s=host_s)


def _host_s(runs: Iterable[Measured]) -> float:
    """Seconds in which a host starts the kernels of a block, by the runs that waited for it; 0 where none did.

    Another GPU's runs tell it as well: the kernels are nearly the same.
    """
    waiting = [run for run in runs if run.waits_for_host and not run.work.compiled and run.work.recompute != "full"]
    found = [run.step_s / (run.work.microbatches * run.work.model.layers) for run in waiting]
    return sum(found) / len(found) if found else 0.0


def _model(name: str, seq_len: int, where: str) -> ModelConfig:
    if name not in PRESETS:
        raise DataError(f"{where}: model is {name!r}, which is not a preset", "keepstep models lists them")
    return ModelConfig(preset=name, **preset_fields(name) | {"seq_len": seq_len})


def _parts(run: Measured, cluster: Cluster) -> list[float]:
    step = plan_speed(run.work, cluster).step
    # Everything that is neither matmul nor attention shares one factor.
    return [step.matmul_s, step.attention_s, step.total_s - step.matmul_s - step.attention_s]


def _mean_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of measured over predicted; 0 where nothing was measured."""
    ratios = [measured / predicted for measured, predicted in pairs if measured > 0]
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else 0.0


def _ridge(rows: Sequence[Sequence[float]], priors: Sequence[float]) -> list[float]:
    """Ridge regression: x near the priors with row·x near 1 for every row; never below a third of its prior."""
    import numpy as np

    places = range(len(priors))
    matrix = [[sum(row[i] * row[j] for row in rows) + (_PRIOR if i == j else 0.0) for j in places] for i in places]
    right = [sum(row[i] for row in rows) + _PRIOR * priors[i] for i in places]
    return [max(float(each), prior / 3) for each, prior in zip(np.linalg.solve(matrix, right), priors, strict=True)]
