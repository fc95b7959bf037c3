"""How many processes go along each axis: plain arithmetic, shared by training and planning."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from keepstep.config.schema import ParallelConfig
from keepstep.core.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis with `-1` resolved; they multiply to the number of processes."""

    replicate: int
    shard: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def data_ranks(self) -> int:
        """Groups of processes that each see different rows."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Processes that share one copy of a stage's weights: a row split over `context` is data like any other."""
        return self.shard * self.context

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.data_ranks * self.tensor * self.pipeline * self.context


def resolve_layout(config: ParallelConfig, world_size: int) -> Layout:
    """Fill in the one `-1` and check that the degrees make up the world."""
    degrees = {
        "replicate": config.replicate,
        "shard": config.shard,
        "tensor": config.tensor,
        "pipeline": config.pipeline,
        "context": config.context,
    }
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise ConfigError(
            f"parallel.{' and parallel.'.join(open_axes)} are both -1, but only one axis can take what is left",
            f"give parallel.{open_axes[0]} a number",
        )
    fixed = prod(degree for degree in degrees.values() if degree != -1)
    if open_axes:
        degrees[open_axes[0]] = world_size // fixed
    if prod(degrees.values()) != world_size or 0 in degrees.values():
        # Axes of degree 1 say nothing: name those that were asked for.
        asked = {axis: getattr(config, axis) for axis, degree in degrees.items() if degree > 1 or axis in open_axes}
        spelled = " × ".join(f"{axis} {degree}" for axis, degree in asked.items()) or "shard 1"
        raise ConfigError(
            f"parallel: {spelled} does not make up {world_size} process(es)",
            f"start a multiple of {fixed} processes, or lower a degree"
            if open_axes
            else f"start {fixed} processes, or set parallel.shard=-1 to take what is left",
        )
    return Layout(**degrees)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Which blocks each pipeline stage holds, in order. Stages that also embed or predict get no block more."""
    small, larger = divmod(layers, stages)
    # Those in the middle first: the ends have the embedding and the head to compute besides.
    middle_first = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    counts = [small + (stage in middle_first[:larger]) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def check_microbatches(config: ParallelConfig, microbatches: int) -> None:
    """Raise where a pipeline has too few micro batches a step, or a number its schedule cannot place."""
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
