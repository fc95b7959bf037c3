"""What every part of a run is built from: its configuration, processes, folder, stop flag and heartbeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.checkpoint.in_memory.snapshots import newest_snapshot
from keepstep.checkpoint.protocol.lease import Leases, this_process
from keepstep.config.layout import check_layout, microbatch_choices
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError
from keepstep.core.ranks import Ranks, from_environment
from keepstep.core.verbosity import progress
from keepstep.observe.logs import recording
from keepstep.observe.run_folder import RunFolder
from keepstep.parallel.mesh import ParallelMesh, build_mesh
from keepstep.parallel.world import World, choose_device, joined_world, share_cores
from keepstep.resilience.heartbeat import Heartbeat
from keepstep.resilience.signals import StopFlag, stop_on_signals
from keepstep.resilience.survivors.device_exchange import nccl_group
from keepstep.resilience.survivors.replica import Replica
from keepstep.resilience.survivors.siblings import Siblings
from keepstep.train.device import check_device, chosen_kernels, settle_auto
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
    replica: Replica | None = None
    """This process among replicas that outlive each other; None where all processes start and end together."""
    microbatch_line: str = ""
    """What `microbatch: auto` chose; `config` has the number."""

    @property
    def processes(self) -> int:
        """Processes that the run was started with."""
        return self.world.ranks.all_processes or self.world.ranks.world_size

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.world.is_first if self.replica is None else self.saves and not self.replica.siblings.rank

    @property
    def saves(self) -> bool:
        """Whether this process takes part in saves: among replicas that outlive each other only those of one do."""
        return self.replica is None or self.replica.leads

    def take_folder(self) -> None:
        """Hold the run's folder in place of a replica that is gone, or that the coordinator has evicted."""
        holder = this_process(self.world.ranks.launch, self.config.resilience.lease_s)
        self.leases.lead(holder, evicts_own=True)
        self.leases.hold(self.folder.root)


@contextmanager
def run_context(config: RunConfig) -> Iterator[RunContext]:
    """Join the other processes and hold the run's folder for the length of a run."""
    check_device(config)
    ranks = from_environment()
    if ranks.coordinator:
        # The others may come and go: to torch every replica is alone.
        ranks = replace(ranks, world_size=config.replica_size, all_processes=ranks.world_size)
    elif config.resilience.survive and ranks.world_size > config.replica_size:
        raise ConfigError("resilience.survive needs the agent of keepstep train", "keepstep train --procs N")
    processes = ranks.all_processes or ranks.world_size
    layout = check_layout(config, processes)
    if ranks.coordinator:
        layout = replace(layout, replicate=1)
    device = choose_device(config.compute.device, ranks.local_rank)
    # Sums over two threads differ from sums over one, and a share of the cores depends on the number of processes.
    threads = config.compute.threads or int(config.reproducible == "elastic")
    share_cores(threads, ranks.local_world_size)
    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    with (
        chosen_kernels(config),
        stop_on_signals() as stop,
        _joined_replica(ranks, stop) as replica,
        Leases(None, lambda: stop.requested, progress) as leases,
    ):
        if replica is not None:
            ranks = replace(ranks, leads=replica.leads and not replica.siblings.rank)
        if ranks.is_first:
            leases.lead(this_process(ranks.launch, config.resilience.lease_s))
        retry_s = config.checkpoint.retry_s
        wait_for_room(retry_s, folder.root, stop, lambda: leases.hold(folder.root), progress)
        with (
            recording(folder.logs, "trainer", ranks.rank),
            joined_world(ranks, device, config.resilience.start_timeout_s) as world,
        ):
            # Here, where all processes can agree, and before anything is built.
            config, microbatch_line = settle_auto(config, folder.config)
            smaller = [rows for rows in microbatch_choices(config, processes) if rows < config.microbatch]
            if replica is not None and config.resilience.exchange == "nccl":
                replica.make_group = nccl_group
            heartbeat = Heartbeat(ranks.heartbeat_file, ranks.local_rank, config.resilience)
            if replica is not None:
                replica.waiting = heartbeat.busy
            mesh = build_mesh(layout, device.type)
            with memory_snapshot_on_oom(config.profile, folder.profile, ranks.rank, device, smaller[-1:]):
                yield RunContext(config, world, mesh, folder, stop, heartbeat, leases, replica, microbatch_line)


@contextmanager
def _joined_replica(ranks: Ranks, stop: StopFlag) -> Iterator[Replica | None]:
    if not ranks.coordinator:
        yield None
        return
    siblings = Siblings(ranks.rank_in_group, ranks.world_size, ranks.store_file)
    number, snapshot = ranks.rank // ranks.world_size, newest_snapshot(ranks.memory_files)
    replica = Replica(ranks.coordinator, number, lambda: stop.requested, snapshot, siblings)
    try:
        yield replica
    finally:
        replica.close()
