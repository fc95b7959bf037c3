"""One device mesh whose axes carry the names of the configuration.

From the processes that talk least to those that talk most: pipeline, replicate, shard, tensor. A row split over context
ranks is data like any other to the weights, so context ranks are neighbours inside the shard axis, and so are those
that divide the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keepstep.config.layout import Layout

_COPIES = "expert_shard"
"""With experts divided among processes the shard axis is two, this one and `expert`: processes along this one hold the
same experts and shard their weights."""


@dataclass(frozen=True)
class ParallelMesh:
    """Where this process stands among all others."""

    device_mesh: DeviceMesh
    layout: Layout
    context_group: dist.ProcessGroup | None
    """Processes that share this process's rows; None where rows are not split."""
    rows_group: dist.ProcessGroup | None = None
    """The same, and those along the tensor axis too, which hold other tokens between matmuls."""

    @property
    def weights_mesh(self) -> DeviceMesh:
        """Processes that hold the same weights: sharded along the last axis, copied along the one before."""
        return self.device_mesh["replicate", "shard"] if self.layout.replicate > 1 else self.device_mesh["shard"]

    @property
    def experts_mesh(self) -> DeviceMesh | None:
        """Processes among which one copy of the experts is divided, along the first axis; None where they are whole."""
        axes = [axis for axis in ("expert", "tensor") if getattr(self.layout, axis) > 1]
        return self.device_mesh[tuple(axes)] if axes else None

    @property
    def expert_weights_mesh(self) -> DeviceMesh:
        """`weights_mesh` of the experts: processes that hold the same part of them."""
        if self.layout.expert == 1:
            return self.weights_mesh
        return self.device_mesh["replicate", _COPIES] if self.layout.replicate > 1 else self.device_mesh[_COPIES]

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
    def row_parts(self) -> int:
        """Processes that hold the tokens of a row between them."""
        return self.layout.context * self.layout.tensor

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
        return self.device_mesh["shard"].get_local_rank()


def build_mesh(layout: Layout, device_type: str) -> ParallelMesh:
    """Join this process to its neighbours along every axis. Collective."""
    degrees = {"pipeline": layout.pipeline, "replicate": layout.replicate, "shard": layout.weight_shards}
    if layout.expert > 1:
        del degrees["shard"]
        degrees |= {_COPIES: layout.weight_shards // layout.expert, "expert": layout.expert}
    degrees["tensor"] = layout.tensor
    mesh = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    if layout.expert > 1:
        mesh[_COPIES, "expert"]._flatten("shard")
    context_group = _rows_group(mesh, layout, with_tensor=False) if layout.context > 1 else None
    split = layout.context * layout.tensor > 1
    return ParallelMesh(mesh, layout, context_group, _rows_group(mesh, layout, with_tensor=True) if split else None)


def _rows_group(mesh: DeviceMesh, layout: Layout, with_tensor: bool) -> dist.ProcessGroup:
    ranks = mesh.mesh.reshape(-1, layout.context, layout.tensor)
    by_rows = ranks.flatten(1) if with_tensor else ranks.movedim(1, 2).flatten(0, 1)
    group, _ = dist.new_subgroups_by_enumeration(by_rows.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group
