"""One device mesh whose axes carry the names of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keepstep.config.layout import Layout

AXES = ("pipeline", "replicate", "shard", "tensor")
"""From the processes that talk least to those that talk most. A row split over context ranks is data like any other to
the weights, so context ranks are neighbours inside the shard axis."""


@dataclass(frozen=True)
class ParallelMesh:
    """Where this process stands among all others."""

    device_mesh: DeviceMesh
    layout: Layout
    context_group: dist.ProcessGroup | None
    """Processes that share this process's rows; None where rows are not split."""

    @property
    def weights_mesh(self) -> DeviceMesh:
        """Processes that hold the same weights: sharded along the last axis, copied along the one before."""
        return self.device_mesh["replicate", "shard"] if self.layout.replicate > 1 else self.device_mesh["shard"]

    @property
    def data_rank(self) -> int:
        """Which part of each global batch is this process's."""
        return (
            self.device_mesh.get_local_rank("replicate") * self.layout.shard + self._shard_rank // self.layout.context
        )

    @property
    def context_rank(self) -> int:
        """Which part of each row is this process's."""
        return self._shard_rank % self.layout.context

    @property
    def pipeline_rank(self) -> int:
        """Which stages are this process's."""
        return self.device_mesh.get_local_rank("pipeline")

    @property
    def counts_loss(self) -> bool:
        """Whether this process adds its losses to the total: one of the tensor ranks that hold the last stage."""
        return self.pipeline_rank == self.layout.pipeline - 1 and self.device_mesh.get_local_rank("tensor") == 0

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Processes that hold the other stages of this process's model; None where there are none."""
        return self.device_mesh.get_group("pipeline") if self.layout.pipeline > 1 else None

    @property
    def _shard_rank(self) -> int:
        return self.device_mesh.get_local_rank("shard")


def build_mesh(layout: Layout, device_type: str) -> ParallelMesh:
    """Join this process to its neighbours along every axis. Collective."""
    degrees = (layout.pipeline, layout.replicate, layout.weight_shards, layout.tensor)
    mesh = init_device_mesh(device_type, degrees, mesh_dim_names=AXES)
    return ParallelMesh(mesh, layout, _context_group(mesh, layout.context) if layout.context > 1 else None)


def _context_group(mesh: DeviceMesh, degree: int) -> dist.ProcessGroup:
    by_rows = mesh.mesh.unflatten(2, (-1, degree)).movedim(3, -1).reshape(-1, degree)
    group, _ = dist.new_subgroups_by_enumeration(by_rows.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group
