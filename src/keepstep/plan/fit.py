"""The smallest changes to a run that make it fit, as overrides that can be pasted after the command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from keepstep.plan.cluster import Cluster
from keepstep.plan.memory import plan_memory
from keepstep.plan.sound import sound
from keepstep.plan.speed import Factors, plan_speed
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class Remedy:
    """One way to fit."""

    words: tuple[str, ...]
    """Overrides of the run."""
    needed_bytes: int
    step_s: float

    @property
    def fields(self) -> int:
        """Settings that change."""
        return len(self.words)


@dataclass(frozen=True)
class _Change:
    """One setting's move; changes of one kind exclude each other."""

    kind: str
    words: tuple[str, ...]
    changes: dict[str, object]


def fits(work: Workload, cluster: Cluster) -> bool:
    """Whether the fullest process has room."""
    return plan_memory(work).needed <= cluster.gpu.memory_gib * 2**30


def remedies(
    work: Workload, cluster: Cluster, factors: Factors, open_shard: bool = True, most: int = 3
) -> list[Remedy]:
    """The `most` smallest changes that fit: fewest settings first, then least time lost. Empty where none is known.

    `open_shard` says that the run's shard degree takes what is left, so that it need not be named.
    """
    changes = list(_changes(work, cluster))
    found: list[Remedy] = []
    for count in (1, 2, 3):
        for chosen in combinations(changes, count):
            if len({change.kind for change in chosen}) == count:
                found.extend(_tried(work, chosen, cluster, factors, open_shard))
        if len(found) >= most:
            break
    return sorted(found, key=lambda remedy: (remedy.fields, remedy.step_s))[:most]


def _tried(
    work: Workload, chosen: tuple[_Change, ...], cluster: Cluster, factors: Factors, open_shard: bool
) -> Iterator[Remedy]:
    degrees = dict[str, int]()
    changed = work
    for change in chosen:
        for name, value in change.changes.items():
            if hasattr(work.degrees, name):
                degrees[name] = int(str(value))
            else:
                changed = replace(changed, **{name: value})  # type: ignore[arg-type]
    if degrees:
        moved = replace(work.degrees, **degrees)
        rest = work.degrees.world_size // max(1, moved.world_size // moved.shard)
        changed = replace(changed, degrees=replace(moved, shard=max(1, rest)))
    if changed.degrees.world_size != work.degrees.world_size or not sound(changed):
        return
    needed = plan_memory(changed).needed
    if needed <= cluster.gpu.memory_gib * 2**30:
        words = [word for change in chosen for word in change.words]
        if changed.degrees.shard != work.degrees.shard and not open_shard:
            words.append(f"parallel.shard={changed.degrees.shard}")
        yield Remedy(tuple(words), needed, plan_speed(changed, cluster, factors).step.total_s)


def _changes(work: Workload, cluster: Cluster) -> Iterator[_Change]:
    """Single settings that save memory, each as far as it can go."""
    for rows in (each for each in _halves(work.microbatch) if work.global_batch % each == 0):
        yield _Change("microbatch", (f"microbatch={rows}",), {"microbatch": rows})
    modes = ("none", "selective", "full")
    for mode in modes[modes.index(work.recompute) + 1 :]:
        yield _Change("recompute", (f"compute.recompute={mode}",), {"recompute": mode})
    if work.keep_gathered and work.degrees.pipeline == 1:
        yield _Change("gathered", ("parallel.keep_gathered=false",), {"keep_gathered": False})
    for copies in _halves(work.degrees.replicate):
        yield _Change("replicate", (f"parallel.replicate={copies}",), {"replicate": copies})
    for axis in ("tensor", "context", "pipeline"):
        for degree in _doubles(int(getattr(work.degrees, axis)), cluster, axis):
            yield _Change(axis, (f"parallel.{axis}={degree}",), {axis: degree})
    if work.precision == "fp32" and "bf16" in cluster.gpu.tflops:
        yield _Change("precision", ("precision=bf16",), {"precision": "bf16"})


def _halves(number: int) -> list[int]:
    smaller = []
    while number > 1:
        number //= 2
        smaller.append(number)
    return smaller


def _doubles(degree: int, cluster: Cluster, axis: str) -> list[int]:
    limit = cluster.gpus_per_node if axis == "tensor" else min(cluster.gpus, 64)
    return [larger for larger in (degree * 2**power for power in range(1, 7)) if larger <= limit]
