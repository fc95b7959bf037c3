"""One device mesh whose axes carry the names of the configuration."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keepstep.config.layout import Layout

AXES = ("replicate", "shard", "tensor")


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Tensor ranks are neighbours (they talk most), replicas are furthest apart."""
    return init_device_mesh(device_type, (layout.replicate, layout.shard, layout.tensor), mesh_dim_names=AXES)


def data_rank(mesh: DeviceMesh) -> int:
    """Which part of each global batch is this process's."""
    rank: int = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    return rank
