"""How the processes of a run are divided among the axes: plain arithmetic, shared by training and planning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import prod

from keepstep.config.check import RULES
from keepstep.config.rules import around, divisors, multiples_around
from keepstep.config.schema import ParallelConfig, RunConfig
from keepstep.core.errors import ConfigError
from keepstep.core.messages import invalid_value, listed

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outermost first: ranks along the last axis are neighbours."""


@dataclass(frozen=True)
class Layout:
    """The degree of every axis, with `-1` resolved. They multiply to the number of processes."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Neighbours among `weight_shards` that divide the experts among them: no axis of its own."""

    @property
    def data_ranks(self) -> int:
        """Groups of processes that read different rows."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Processes that shard one copy of a stage's weights: FSDP also shards over `context`."""
        return self.shard * self.context

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.data_ranks * self.tensor * self.pipeline * self.context

    @property
    def data_only(self) -> bool:
        """Whether every process computes whole rows with all experts."""
        return self.tensor == self.pipeline == self.context == self.expert == 1

    @property
    def used_axes(self) -> list[str]:
        """Axes with more than one process."""
        return [axis for axis in AXES if getattr(self, axis) > 1]

    def stride(self, axis: str) -> int:
        """Ranks between two neighbours along an axis; those that divide experts are the nearest of the shard axis."""
        if axis == "expert":
            return self.tensor
        return prod(int(getattr(self, nearer)) for nearer in AXES[AXES.index(axis) + 1 :])

    def text(self) -> str:
        """The axes that are used, for people."""
        axes = " × ".join(f"{axis} {getattr(self, axis)}" for axis in self.used_axes) or "one process"
        return f"{axes} with expert {self.expert}" if self.expert > 1 else axes

    def overrides(self) -> Iterator[str]:
        """The layout as overrides of a run."""
        for axis in reversed(AXES):
            yield f"parallel.{axis}={getattr(self, axis)}"
        if self.expert > 1:
            yield f"parallel.expert={self.expert}"


def check_layout(config: RunConfig, world_size: int) -> Layout:
    """How this many processes share the run. Raises a ConfigError where they cannot."""
    if not config.microbatch:
        return check_layout(replace(config, microbatch=microbatch_choices(config, world_size)[0]), world_size)
    layout = resolve_layout(config.parallel, world_size)
    if config.replica_size > 1:
        # Any number of replicas works. Each takes one micro batch for every process of it at a time.
        accumulation_steps(config.global_batch, config.microbatch, config.replica_size)
        return layout
    if config.whole_weights:
        # Processes take micro batches one by one: any number works, and each holds whole weights.
        return Layout(replicate=layout.data_ranks, shard=1)
    _check_experts(config, layout)
    check_microbatches(config.parallel, accumulation_steps(config.global_batch, config.microbatch, layout.data_ranks))
    return layout


def may_compile(config: RunConfig, layout: Layout) -> bool:
    """Whether `compute.compile: auto` compiles blocks on GPUs: in runs of a kind that has been tried there."""
    if config.model.linear not in ("dense", "fp8") or not layout.data_only:
        return False
    compiled = replace(config, compute=replace(config.compute, compile=True))
    return not any(rule.find(compiled) for rule in RULES if "compute.compile" in rule.fields)


def microbatch_choices(config: RunConfig, world_size: int) -> list[int]:
    """Rows per forward pass that obey all rules on this many processes, in order, whatever the configuration has.

    Raises a ConfigError where there is none.
    """
    rules = [rule for rule in RULES if "microbatch" in rule.fields]
    given = [replace(config, microbatch=rows) for rows in divisors(config.global_batch)]
    given = [each for each in given if not any(rule.find(each) for rule in rules)]
    found: list[int] = []
    for each in given:
        with suppress(ConfigError):
            check_layout(each, world_size)
            found.append(each.microbatch)
    if not found:
        # Its error says which numbers would divide.
        check_layout(next(iter(given), replace(config, microbatch=config.rl.num_generations)), world_size)
    return found


def _check_experts(config: RunConfig, layout: Layout) -> None:
    """Raise where processes that hold the same experts can shard them neither by expert nor inside each."""
    model, copies = config.model, layout.weight_shards // layout.expert
    if layout.expert == 1 or model.experts.count // layout.expert % copies == 0:
        return
    if model.hidden % copies or 2 * model.expert_size % copies:
        rule = f"leaves {copies} processes with the same experts, which cannot shard {model.experts.count} evenly"
        choices = [each for each in divisors(layout.weight_shards) if model.experts.count % each == 0]
        hint = f"parallel.expert={listed(around(choices, layout.expert))}, or raise parallel.replicate"
        raise ConfigError(invalid_value("parallel.expert", layout.expert, rule), hint)


def accumulation_steps(global_batch: int, microbatch: int, data_ranks: int) -> int:
    """Micro batches of each process in one optimizer step. A ConfigError suggests values nearby that divide."""
    rows = microbatch * data_ranks
    if global_batch > 0 and global_batch % rows == 0:
        return global_batch // rows
    remedies = [f"global_batch={listed(multiples_around(rows, global_batch))}"]
    if global_batch % data_ranks == 0:
        remedies.append(f"microbatch={listed(around(divisors(global_batch // data_ranks), microbatch))}")
    if global_batch % microbatch == 0:
        ranks = around(divisors(global_batch // microbatch), data_ranks)
        remedies.append(f"{listed(ranks)} data-parallel processes")
    product = f"{microbatch} × {data_ranks} = {rows}"
    rule = f"must be a multiple of microbatch × data-parallel processes ({product})"
    raise ConfigError(invalid_value("global_batch", global_batch, rule), ", or ".join(remedies))


def resolve_layout(config: ParallelConfig, world_size: int) -> Layout:
    """Fill in the one `-1` and check that the degrees multiply to the number of processes."""
    degrees: dict[str, int] = {axis.name: getattr(config, axis.name) for axis in fields(Layout) if axis.name in AXES}
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        both = " and ".join(f"parallel.{axis}" for axis in open_axes)
        raise ConfigError(
            f"{both} are both -1, but only one axis can take the remaining processes", f"{both.split()[0]}=1"
        )
    fixed = prod(degree for degree in degrees.values() if degree != -1)
    if open_axes:
        degrees[open_axes[0]] = world_size // fixed
    if prod(degrees.values()) != world_size or 0 in degrees.values():
        # Axes of degree 1 are the default: name only the others.
        asked = {axis: getattr(config, axis) for axis, degree in degrees.items() if degree > 1 or axis in open_axes}
        spelled = " × ".join(f"{axis} {degree}" for axis, degree in asked.items()) or "shard 1"
        raise ConfigError(
            f"parallel: {spelled} does not multiply to {world_size} process(es)",
            f"start a multiple of {fixed} processes, or lower a degree"
            if open_axes
            else ", or ".join([f"start {fixed} processes", *_ways_to_use_all(degrees, world_size)]),
        )
    layout = Layout(**degrees, expert=config.expert)
    if layout.weight_shards % config.expert:
        choices = around(divisors(layout.weight_shards), config.expert)
        rule = f"must divide parallel.shard × parallel.context ({layout.weight_shards})"
        raise ConfigError(invalid_value("parallel.expert", config.expert, rule), f"parallel.expert={listed(choices)}")
    return layout


def _ways_to_use_all(degrees: dict[str, int], world_size: int) -> Iterator[str]:
    """Settings that take the processes that are left, where they are a multiple of the other degrees."""
    fixed = prod(degrees.values())
    if world_size % (fixed // degrees["replicate"]) == 0:
        yield f"parallel.replicate=-1 for {world_size * degrees['replicate'] // fixed} replicas"
    if world_size % (fixed // degrees["shard"]) == 0:
        yield f"parallel.shard=-1 to shard over {world_size * degrees['shard'] // fixed} processes"


def stage_layers(layers: int, stages: int) -> list[range]:
    """Which blocks each pipeline stage holds, in order."""
    small, larger = divmod(layers, stages)
    # Extra blocks go to the middle stages: the first and last also compute the embedding and the head.
    middle_first = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    counts = [small + (stage in middle_first[:larger]) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def check_microbatches(config: ParallelConfig, microbatches: int) -> None:
    """Raise where a pipeline has too few micro batches per step, or a number that its schedule cannot place."""
    if config.pipeline == 1:
        return
    least = config.pipeline * (config.stages_per_process if config.schedule == "1f1b" else 1)
    uneven = config.schedule != "1f1b" and microbatches % config.pipeline
    if microbatches >= least and not uneven:
        return
    rule = f"at least {least}" if config.schedule == "1f1b" else f"a multiple of {config.pipeline}"
    raise ConfigError(
        f"parallel.pipeline is {config.pipeline} with schedule {config.schedule}, but each process then needs {rule} "
        f"micro batches a step, and has {microbatches}",
        "raise global_batch or lower microbatch",
    )
