"""The rank of this process and the nodes of its job, from variables of torchrun, our agent, Slurm and Kubernetes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value

STORE_FILE = "KEEPSTEP_STORE_FILE"
"""Environment variable: the rendezvous file for the processes of a single node."""
HEARTBEAT_FILE = "KEEPSTEP_PULSE_FILE"
"""Environment variable: the heartbeat file, where a process reports progress to its node's agent."""
MEMORY_FILES = "KEEPSTEP_MEMORY_FILES"
"""Environment variable: files in the agent's memory, where snapshots survive the process."""
MEMORY_NAME = "keepstep-state"
"""Name of that memory among the agent's open files, by which a rescue finds it."""
COORDINATOR = "KEEPSTEP_COORDINATOR"
"""Environment variable: the socket of the coordinator, where replicas that outlive each other meet."""
REPLICA_SECRET = "KEEPSTEP_REPLICA_SECRET"
"""Environment variable: what replicas of several nodes prove to know before they talk to each other."""
LAUNCH = "KEEPSTEP_LAUNCH"
"""Environment variable: identifies the agent that started a process, or with replicas that outlive each other the first
agent of the run; the same after a restart by that agent."""
RENDEZVOUS_SECRET = "KEEPSTEP_RENDEZVOUS_SECRET"
"""Environment variable: a random text, the same on every node of a run; only nodes that know it join."""
_SECRET_CHARACTERS = 16
_DEFAULT_PORT = 29500
_NODE_RANK = ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "LWS_WORKER_INDEX", "VC_TASK_INDEX", "RANK")


@dataclass(frozen=True)
class Ranks:
    """This process and the number of all processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0
    launch: str = ""
    """Identifies the launcher that started this process and restarts it."""
    store_file: str = ""
    heartbeat_file: Path | None = None
    memory_files: tuple[Path, ...] = ()
    coordinator: str = ""
    """Where replicas that outlive each other connect. `world_size` is then the number of processes of each."""
    all_processes: int = 0
    """Processes of all such replicas that the run was started with."""
    leads: bool | None = None
    """Among such replicas: whether this process writes for all."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0 if self.leads is None else self.leads

    @property
    def rank_in_group(self) -> int:
        """The rank in this process's own process group: that of its replica, where replicas outlive each other."""
        return self.rank % self.world_size

    @property
    def supervised(self) -> bool:
        """Whether our agent watches this process and restarts it."""
        return self.heartbeat_file is not None

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process (and set the rendezvous variables)."""
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def from_environment() -> Ranks:
    """Read torchrun's variables. Without them this is the only process."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    heartbeat = os.environ.get(HEARTBEAT_FILE)
    memory = os.environ.get(MEMORY_FILES, "")
    return Ranks(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
        launch=os.environ.get(LAUNCH) or os.environ.get("TORCHELASTIC_RUN_ID", ""),
        store_file=os.environ.get(STORE_FILE, ""),
        heartbeat_file=Path(heartbeat) if heartbeat else None,
        memory_files=tuple(Path(path) for path in memory.split(os.pathsep) if path),
        coordinator=os.environ.get(COORDINATOR, ""),
    )


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of one run, and which of them this is."""

    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = "localhost:0"
    """host:port of the rendezvous."""
    run_id: str = ""
    """Identifies the attempt, so that a late process of the previous attempt cannot join this one."""
    is_host: bool = False
    """Whether this node hosts the rendezvous."""
    secret: bytes = field(default=b"", repr=False)
    """What every node of the run knows, and nobody else."""
    max_restarts: int = 0
    """Restarts of the workers on this node before it gives up."""
    join_timeout_s: int = 600
    """How long to wait for the other nodes: image pulls can end minutes apart."""


def node_range(text: str) -> tuple[int, int]:
    """Read `4` or `2:4`."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", text)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(invalid_value("--nodes", text, "must be a number or MIN:MAX"), "--nodes 4 or --nodes 2:4")
    return int(match[1]), int(match[2] or match[1])


def group_from_environment(nodes: str, max_restarts: int, environment: Mapping[str, str]) -> NodeGroup:
    """The rendezvous, from the variables of our Slurm script, or of the operator that made the pod."""
    low, high = node_range(nodes)
    if high == 1:
        return NodeGroup(max_restarts=max_restarts)
    address = _first(environment, "KEEPSTEP_HEAD", "PET_MASTER_ADDR", "MASTER_ADDR")
    rank = _first(environment, *_NODE_RANK)
    if address is None or rank is None:
        raise UsageError(
            f"--nodes is {nodes}, but no variable names the rendezvous",
            "set MASTER_ADDR, MASTER_PORT and PET_NODE_RANK, or submit with keepstep train --on",
        )
    port = _first(environment, "KEEPSTEP_PORT", "PET_MASTER_PORT", "MASTER_PORT") or str(_DEFAULT_PORT)
    if not port.isdigit() or not rank.isdigit():
        raise UsageError(
            f"port {port!r} and node rank {rank!r} must be numbers",
            "check MASTER_PORT and PET_NODE_RANK in the job's environment",
        )
    secret = environment.get(RENDEZVOUS_SECRET, "")
    if len(secret) < _SECRET_CHARACTERS:
        raise UsageError(
            f"--nodes is {nodes}, but {RENDEZVOUS_SECRET} is {'too short' if secret else 'not set'}",
            f"on every node the same {_SECRET_CHARACTERS} or more random characters, as from: openssl rand -hex 32",
        )
    return NodeGroup(
        min_nodes=low,
        max_nodes=high,
        endpoint=f"{address}:{port}",
        run_id=environment.get("KEEPSTEP_ATTEMPT", f"{address}:{port}"),
        is_host=int(rank) == 0,
        secret=secret.encode(),
        max_restarts=max_restarts,
    )


def node_number(environment: Mapping[str, str]) -> int:
    """The rank of this node in its job; 0 if unknown."""
    rank = _first(environment, *_NODE_RANK) or ""
    return int(rank) if rank.isdigit() else 0


def own_address(host: str, port: int = 9) -> str | None:
    """This machine's address on the network that leads to `host`; None where that is unknown."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing: the system only chooses the route.
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
