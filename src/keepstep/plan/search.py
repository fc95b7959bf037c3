"""Every sound layout of a run on a cluster, ranked by time among those that fit, and which of them are worth a look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.plan.cluster import Cluster
from keepstep.plan.memory import plan_memory
from keepstep.plan.sound import sound
from keepstep.plan.speed import Factors, plan_speed
from keepstep.plan.workload import Degrees, Precision, Recompute, Workload

_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_MICROBATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Candidate:
    """One layout with what it costs."""

    work: Workload
    needed_bytes: int
    step_s: float
    tokens_per_s: float
    mfu: float
    fits: bool

    def words(self) -> list[str]:
        """As overrides of the run."""
        work = self.work
        words = [*work.degrees.words(), f"microbatch={work.microbatch}", f"compute.recompute={work.recompute}"]
        if work.degrees.pipeline == 1:
            words.append(f"parallel.keep_gathered={str(work.keep_gathered).lower()}")
        return [*words, f"precision={work.precision}"]


def precisions(work: Workload, cluster: Cluster, is_open: bool) -> tuple[Precision, ...]:
    """What there is to choose: fp8 as well where the run leaves its precision open and the GPU has it."""
    # Blocks of another kind than plain linears would lose it to fp8.
    choice = is_open and work.precision == "bf16" and "fp8" in cluster.gpu.tflops and work.model.linear == "dense"
    return ("bf16", "fp8") if choice else (work.precision,)


def layouts(base: Workload, cluster: Cluster, precisions: Sequence[Precision]) -> Iterator[Workload]:
    """All sound layouts of the cluster's GPUs, times micro batch, recomputation, sharding and precision."""
    for degrees in _factorings(base, cluster):
        for microbatch in _MICROBATCHES:
            for recompute in _RECOMPUTE:
                for keep_gathered in _gathered(base, degrees):
                    for precision in precisions:
                        work = replace(
                            base,
                            degrees=degrees,
                            microbatch=microbatch,
                            recompute=recompute,
                            keep_gathered=keep_gathered,
                            precision=precision,
                        )
                        if sound(work):
                            yield work


def _gathered(base: Workload, degrees: Degrees) -> tuple[bool, ...]:
    """What there is to choose: nothing where each process holds whole weights, or where a pipeline keeps them."""
    if base.exact:
        return (False,)
    return (False, True) if degrees.pipeline == 1 else (True,)


def _factorings(base: Workload, cluster: Cluster) -> Iterator[Degrees]:
    gpus, model = cluster.gpus, base.model
    for tensor in _divisors(min(cluster.gpus_per_node, model.key_value_heads), gpus):
        for context in _divisors(16, gpus // tensor):
            for pipeline in _divisors(model.layers, gpus // tensor // context):
                data = gpus // tensor // context // pipeline
                for replicate in _divisors(data, data):
                    yield Degrees(replicate, data // replicate, tensor, pipeline, context)


def _divisors(limit: int, number: int) -> list[int]:
    return [each for each in range(1, min(limit, number) + 1) if number % each == 0]


def search(base: Workload, cluster: Cluster, factors: Factors, precisions: Sequence[Precision]) -> list[Candidate]:
    """All candidates: those that fit come first, fastest first; then the rest by how much memory they lack."""
    limit = cluster.gpu.memory_gib * 2**30
    found = []
    for work in layouts(base, cluster, precisions):
        needed = plan_memory(work).needed
        speed = plan_speed(work, cluster, factors)
        found.append(Candidate(work, needed, speed.step.total_s, speed.tokens_per_s, speed.mfu, needed <= limit))
    return sorted(found, key=lambda each: (not each.fits, each.step_s if each.fits else each.needed_bytes))


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both time and memory, from the least memory to the least time."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda candidate: (candidate.needed_bytes, candidate.step_s)):
        if not front or each.step_s < front[-1].step_s:
            front.append(each)
    return front


def pareto_picture(candidates: Sequence[Candidate], cluster: Cluster, path: Path, title: str) -> None:
    """Time against memory as PNG: all layouts, the front, and where the device's memory ends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    by_tensor: dict[int, list[Candidate]] = {}
    for each in candidates:
        by_tensor.setdefault(each.work.degrees.tensor, []).append(each)
    for tensor, group in sorted(by_tensor.items()):
        axes.scatter(*_points(group), s=7, alpha=0.45, linewidths=0, label=f"tensor {tensor}")
    front = pareto(candidates)
    axes.plot(*_points(front), color="black", linewidth=1.2, marker="o", markersize=3.5, label="nothing is better")
    axes.axvline(cluster.gpu.memory_gib, color="crimson", linestyle="--", linewidth=1)
    axes.annotate(
        f"{cluster.gpu.name} ends", (cluster.gpu.memory_gib, 0.98), xycoords=("data", "axes fraction"), color="crimson",
        rotation=90, va="top", ha="right", fontsize=8,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="memory a GPU needs (GiB)", ylabel="seconds a step", title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.needed_bytes / 2**30 for each in candidates], [each.step_s for each in candidates]
