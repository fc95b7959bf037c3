"""What every part of a run is built from: its configuration, processes, folder, stop flag and heartbeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint.protocol.lease import Leases, this_process
from keepstep.config.layout import check_layout
from keepstep.config.schema import RunConfig
from keepstep.core.ranks import from_environment
from keepstep.core.verbosity import progress
from keepstep.observe.logs import recording
from keepstep.observe.run_folder import RunFolder
from keepstep.parallel.mesh import ParallelMesh, build_mesh
from keepstep.parallel.world import World, choose_device, joined_world, share_cores
from keepstep.resilience.heartbeat import Heartbeat
from keepstep.resilience.signals import StopFlag, stop_on_signals
from keepstep.train.device import chosen_kernels
from keepstep.train.recovery.storage_wait import wait_for_room
from keepstep.train.telemetry.profiler import memory_snapshot_on_oom


@dataclass(frozen=True)
class RunContext:
    """One process of a run, before anything is built."""

    config: RunConfig
    world: World
    mesh: ParallelMesh
    folder: RunFolder
    stop: StopFlag
    heartbeat: Heartbeat
    leases: Leases

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.world.is_first


@contextmanager
def run_context(config: RunConfig) -> Iterator[RunContext]:
    """Join the other processes and hold the run's folder for the length of a run."""
    ranks = from_environment()
    layout = check_layout(config, ranks.world_size)
    device = choose_device(config.compute.device, ranks.local_rank)
    # Sums over two threads differ from sums over one, and a share of the cores depends on the number of processes.
    threads = config.compute.threads or int(config.reproducible == "elastic")
    share_cores(threads, ranks.local_world_size)
    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    own = this_process(ranks.launch, config.resilience.lease_s) if ranks.is_first else None
    with chosen_kernels(config), stop_on_signals() as stop, Leases(own, lambda: stop.requested, progress) as leases:
        retry_s = config.checkpoint.retry_s
        wait_for_room(retry_s, folder.root, stop, lambda: leases.hold(folder.root), progress)
        with (
            recording(folder.logs, "trainer", ranks.rank),
            joined_world(ranks, device, config.resilience.start_timeout_s) as world,
            memory_snapshot_on_oom(config.profile, folder.profile, ranks.rank, device),
        ):
            heartbeat = Heartbeat(ranks.heartbeat_file, ranks.local_rank, config.resilience)
            yield RunContext(config, world, build_mesh(layout, device.type), folder, stop, heartbeat, leases)
