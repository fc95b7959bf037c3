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
    tensor: int

    @property
    def data_ranks(self) -> int:
        """Groups of processes that each see different rows."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.data_ranks * self.tensor


def resolve_layout(config: ParallelConfig, world_size: int) -> Layout:
    """Fill in the one `-1` and check that the degrees make up the world."""
    degrees = {"replicate": config.replicate, "shard": config.shard, "tensor": config.tensor}
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
        spelled = " × ".join(f"{axis} {config_degree}" for axis, config_degree in degrees.items())
        raise ConfigError(
            f"parallel: {spelled} does not make up {world_size} process(es)",
            f"start a multiple of {fixed} processes, or lower a degree"
            if open_axes
            else f"start {fixed} processes, or set parallel.shard=-1 to take what is left",
        )
    return Layout(**degrees)
