"""Which node am I, and where do the nodes meet? Facts that Slurm and the Kubernetes operators set; no torch needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.errors import UsageError

DEFAULT_PORT = 29500
_NODE_RANK = ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of one run and this node's place among them."""

    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = "localhost:0"
    """host:port of the node where all meet."""
    run_id: str = ""
    """Tells attempts of one job apart, so that a late process of the last attempt cannot join this one."""
    is_host: bool | None = None
    """Whether this node holds the meeting point; None lets torch find out from the host name."""
    max_restarts: int = 0
    """Restarts of the workers in place before the node gives up."""
    join_timeout_s: int = 600
    """How long to wait for the others: image pulls end minutes apart."""


def node_range(text: str) -> tuple[int, int]:
    """Read `4` or `2:4`."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", text)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(f"--nodes is {text!r}, but it must be a number or MIN:MAX", "--nodes 4 or --nodes 2:4")
    return int(match[1]), int(match[2] or match[1])


def group_from_environment(nodes: str, max_restarts: int, environment: Mapping[str, str]) -> NodeGroup:
    """Where the nodes meet, as whoever started us says: our Slurm script, either Kubeflow operator, or JobSet."""
    low, high = node_range(nodes)
    if high == 1:
        return NodeGroup(max_restarts=max_restarts)
    address = _first(environment, "KEEPSTEP_HEAD", "PET_MASTER_ADDR", "MASTER_ADDR")
    rank = _first(environment, *_NODE_RANK)
    if address is None or rank is None:
        raise UsageError(
            f"--nodes is {nodes}, but nothing says where the nodes meet",
            "set MASTER_ADDR, MASTER_PORT and PET_NODE_RANK, or submit with keepstep train --on",
        )
    port = _first(environment, "KEEPSTEP_PORT", "PET_MASTER_PORT", "MASTER_PORT") or str(DEFAULT_PORT)
    if not port.isdigit() or not rank.isdigit():
        raise UsageError(f"port {port!r} and node rank {rank!r} must be numbers", "see the job's environment")
    return NodeGroup(
        min_nodes=low,
        max_nodes=high,
        endpoint=f"{address}:{port}",
        run_id=environment.get("KEEPSTEP_ATTEMPT", f"{address}:{port}"),
        is_host=int(rank) == 0,
        max_restarts=max_restarts,
    )


def node_number(environment: Mapping[str, str]) -> int:
    """This node's place among those of its job; 0 where nothing says so."""
    rank = _first(environment, *_NODE_RANK) or ""
    return int(rank) if rank.isdigit() else 0


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
