"""Settings that nobody gave, chosen for a cluster: degrees, micro batch, global batch and recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from operator import attrgetter

from keepstep.config.dump import NEW_RUN_BATCH
from keepstep.config.layout import Layout, check_layout, resolve_layout
from keepstep.config.load import LoadedConfig
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError
from keepstep.core.verbosity import debug
from keepstep.models.size import parameter_count
from keepstep.plan.cluster import GIB, Cluster
from keepstep.plan.memory import plan_memory
from keepstep.plan.plan import Assumptions, Plan, make_plan
from keepstep.plan.search import MARGIN, expert_degrees
from keepstep.plan.speed import Factors, plan_speed
from keepstep.plan.workload import RECOMPUTE, Precision, Workload, is_valid, workload_of

_AXES = ("tensor", "pipeline", "context", "replicate", "expert")
_SHARES = ("replicate", "shard")
_BATCH = ("global_batch", "microbatch")
_OPEN = (*(f"parallel.{axis}" for axis in _AXES), "parallel.shard", *_BATCH)
_MICROBATCHES = (1, 2, 4, 8)
_STATE_BYTES = 16
"""Weights, gradients and moments of one parameter."""
_MOST_STAGES = 16
"""Pipelines of published runs are rarely deeper."""
_MOST_TOKENS = 16 << 20
"""Tokens per step that a chosen batch exceeds only where no other layout exists: Llama 3's largest batch."""
_ENOUGH_SPEED = 0.9
"""A smaller batch is preferred as long as it reaches this share of the best throughput: larger ones train worse."""


@dataclass(frozen=True)
class Choice:
    """The configuration with what was chosen, the same as overrides, and whether it fits on the device."""

    config: RunConfig
    overrides: tuple[str, ...]
    fits: bool = True


def not_given(loaded: LoadedConfig) -> frozenset[str]:
    """Fields that may be chosen: those at their default, and a batch that still is the one of `keepstep new`."""
    origins, config = loaded.origins, loaded.config
    open_fields = {name for name in _OPEN if origins[name].kind == "default"}
    open_fields |= {f"parallel.{axis}" for axis in _SHARES if getattr(config.parallel, axis) == -1}
    is_new = config.global_batch == NEW_RUN_BATCH and not config.microbatch
    open_fields |= set() if config.microbatch else {"microbatch"}
    open_fields |= {"global_batch"} if is_new and all(origins[name].kind == "file" for name in _BATCH) else set()
    return frozenset(open_fields)


def plan_or_choose(
    config: RunConfig,
    open_fields: frozenset[str],
    cluster: Cluster,
    assumptions: Assumptions,
    precision: Precision = "bf16",
) -> Plan:
    """Plan the run as it is; where that is no layout or does not fit, with what nobody gave chosen."""
    try:
        plan, error = make_plan(config, cluster, assumptions, precision), None
    except ConfigError as found:
        plan, error = None, found
    if plan is not None and plan.fits_device:
        return plan
    choice = choose_layout(config, open_fields, cluster, assumptions.factors, precision)
    if choice is not None and choice.overrides:
        return replace(make_plan(choice.config, cluster, assumptions, precision), chosen=choice.overrides)
    if plan is None:
        assert error is not None
        raise ConfigError(error.message, f"{error.hint}, or leave it out to have it chosen")
    return plan


def choose_layout(
    config: RunConfig, open_fields: frozenset[str], cluster: Cluster, factors: Factors, precision: Precision = "bf16"
) -> Choice | None:
    """The fastest layout that fits, with the smallest batch that is nearly as fast; else the one with least memory.

    None where what was given leaves no valid layout.
    """
    limit = (1 - MARGIN) * cluster.gpu.memory_gib * GIB
    works = list(_candidates(config, open_fields, cluster, precision))
    most = max(config.global_batch, _MOST_TOKENS // config.model.seq_len)
    works = [work for work in works if work.global_batch <= most] or works
    rated = [(plan_speed(work, cluster, factors).tokens_per_s, work) for work in works if _may_fit(work, limit)]
    debug(f"{len(works):,} layouts are valid on {cluster.gpus} GPUs; {len(rated):,} may fit")
    best: list[tuple[float, Workload]] = []
    needed: dict[object, int] = {}
    # Where a step waits for something else, recomputation seems free.
    for speed, work in sorted(rated, key=lambda each: (-float(f"{each[0]:.6g}"), RECOMPUTE.index(each[1].recompute))):
        if best and speed < _ENOUGH_SPEED * best[0][0]:
            break
        if best and work.global_batch >= best[-1][1].global_batch:
            continue
        # Memory does not depend on the global batch, and is the slow part of a plan.
        key = (work.degrees, work.microbatch, work.recompute)
        needed[key] = needed.get(key) or plan_memory(work).needed
        if needed[key] <= limit:
            best.append((speed, work))
    if best:
        return _choice(config, best[-1][1])
    smallest = sorted(works, key=lambda work: (-RECOMPUTE.index(work.recompute), work.microbatch, -_split(work)))[:8]
    least = min(smallest, key=lambda work: plan_memory(work).needed, default=None)
    return None if least is None else replace(_choice(config, least), fits=False)


def _candidates(
    config: RunConfig, open_fields: frozenset[str], cluster: Cluster, precision: Precision
) -> Iterator[Workload]:
    """Valid layouts: tensor parallelism inside a machine, rows whole, weights sharded over all or over a machine."""
    # A single process stands for the layout until a candidate replaces it.
    alone = replace(config.parallel, replicate=1, shard=-1, tensor=1, pipeline=1, context=1, expert=1)
    one = replace(config, parallel=alone, global_batch=1, microbatch=1)
    base = workload_of(one, 1, precision, int(cluster.gpu.memory_gib * GIB))
    recomputes = RECOMPUTE if config.compute.recompute == "auto" else (base.recompute,)
    rows = _MICROBATCHES if "microbatch" in open_fields else (config.microbatch,)
    given = () if "parallel.expert" in open_fields else (config.parallel.expert,)
    spread = [
        replace(layout, expert=degree)
        for layout in _degrees(config, open_fields, cluster)
        for degree in given or expert_degrees(base, layout, cluster)
        if layout.weight_shards % degree == 0
    ]
    for degrees, microbatch in product(spread, rows):
        for batch in _batches(config, open_fields, degrees, microbatch):
            for recompute in recomputes:
                work = replace(base, degrees=degrees, microbatch=microbatch, global_batch=batch, recompute=recompute)
                if is_valid(work):
                    yield work


def _degrees(config: RunConfig, open_fields: frozenset[str], cluster: Cluster) -> Iterator[Layout]:
    def values(axis: str, most: int) -> Sequence[int]:
        if f"parallel.{axis}" not in open_fields:
            return (getattr(config.parallel, axis),)
        return [degree for degree in range(1, most + 1) if cluster.gpus % degree == 0 and degree & (degree - 1) == 0]

    # Short rows are not worth a ring: other axes are faster there.
    contexts = values("context", max(1, config.model.seq_len // 4096))
    tensors = values("tensor", cluster.gpus_per_node)
    # Stages need a large batch. They are worth it for models that one machine cannot hold.
    is_large = _STATE_BYTES * parameter_count(config.model) > cluster.gpus_per_node * cluster.gpu.memory_gib * GIB
    pipelines = values("pipeline", min(_MOST_STAGES, config.model.layers) if is_large else 1)
    for tensor, pipeline, context in product(tensors, pipelines, contexts):
        data, left_over = divmod(cluster.gpus, tensor * pipeline * context)
        if left_over or not data:
            continue
        if config.whole_weights:
            yield Layout(replicate=data)
            continue
        given = {axis: getattr(config.parallel, axis) for axis in _SHARES if f"parallel.{axis}" not in open_fields}
        for shard in sorted({data, min(data, cluster.gpus_per_node), given.get("shard", data)}):
            layout = Layout(given.get("replicate", data // shard), shard, tensor, pipeline, context)
            if "replicate" in given:
                layout = replace(layout, shard=data // layout.replicate)
            if layout.world_size == cluster.gpus and layout.shard == given.get("shard", layout.shard):
                yield layout


def _batches(config: RunConfig, open_fields: frozenset[str], degrees: Layout, microbatch: int) -> list[int]:
    if "global_batch" not in open_fields:
        return [config.global_batch]
    unit = microbatch * degrees.data_ranks * degrees.pipeline
    # That of the configuration stays the aim: fine-tuning has few rows, and a larger batch would leave few steps.
    least = config.global_batch
    # A pipeline's bubble shrinks with more micro batches; other layouts gain little from a larger batch.
    targets = [least, 4 * least, 8 * least] if degrees.pipeline > 1 else [least]
    return sorted({-(-target // unit) * unit for target in targets})


def _split(work: Workload) -> int:
    """Processes among which the weights are divided."""
    return work.degrees.tensor * work.degrees.pipeline * work.degrees.weight_shards


def _may_fit(work: Workload, limit: float) -> bool:
    """Whether weights, gradients and moments alone leave room."""
    if work.lora_rank or work.offload:
        return True
    return _STATE_BYTES * parameter_count(work.model) / _split(work) <= limit


def _choice(config: RunConfig, work: Workload) -> Choice:
    degrees = {} if work.elastic else {axis: getattr(work.degrees, axis) for axis in _AXES}
    chosen = replace(
        config,
        microbatch=work.microbatch,
        global_batch=work.global_batch,
        parallel=replace(config.parallel, **degrees),
    )
    return Choice(chosen, differences(config, chosen))


def differences(given: RunConfig, chosen: RunConfig) -> tuple[str, ...]:
    """What was chosen, as overrides."""
    values = [(name, attrgetter(name)(given), attrgetter(name)(chosen)) for name in _OPEN]
    return tuple(f"{name}={now}" for name, before, now in values if before != now)


def choose_batch(config: RunConfig, open_fields: frozenset[str], world_sizes: Sequence[int]) -> Choice | None:
    """A global batch for each of these numbers of processes of unknown machines; None where it is given."""
    if "global_batch" not in open_fields:
        return None
    try:
        layouts = [resolve_layout(config.parallel, size) for size in world_sizes]
    except ConfigError:
        return None
    unit = lcm(*((config.microbatch or 1) * each.data_ranks * each.pipeline for each in layouts))
    chosen = replace(config, global_batch=-(-config.global_batch // unit) * unit)
    try:
        for size in world_sizes:
            check_layout(chosen, size)
    except ConfigError:
        return None
    return Choice(chosen, differences(config, chosen))
