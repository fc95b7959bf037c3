"""Memory of the machines themselves: what is offloaded there, and the copy that a save writes from."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.plan.cluster import Cluster
from keepstep.plan.memory import offloaded_bytes
from keepstep.plan.workload import Workload

GIB = 2**30


@dataclass(frozen=True)
class HostPlan:
    """Bytes of one machine's memory that the run takes for its state, beside what any program takes."""

    offloaded: int
    """Weights, gradients and moments of all its processes, where `parallel.offload` keeps them there."""
    copy: int
    """The machine's part of a checkpoint, copied aside so that training goes on while it is written."""
    available_gib: float
    """0 where the profile does not say."""

    @property
    def needed(self) -> int:
        """All of it. Copies that outlive processes come on top, but only where there is room for them."""
        return self.offloaded + self.copy

    @property
    def fits(self) -> bool:
        """Whether a machine has as much; taken for granted where the profile does not say."""
        return not self.available_gib or self.needed <= self.available_gib * GIB


def plan_host(work: Workload, cluster: Cluster, checkpoint_bytes: int) -> HostPlan:
    """What one machine holds; the fullest process stands for all."""
    return HostPlan(
        offloaded=offloaded_bytes(work) * cluster.gpus_per_node,
        copy=-(-checkpoint_bytes // cluster.nodes),
        available_gib=cluster.host_memory_gib,
    )
