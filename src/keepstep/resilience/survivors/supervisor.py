"""The agent's part: a replica that ends is replaced while the others continue, as long as one of them has the state."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from keepstep.config.schema import ResilienceConfig
from keepstep.core import proc
from keepstep.core.ranks import COORDINATOR, REPLICA_SECRET, NodeGroup
from keepstep.core.units import format_seconds
from keepstep.resilience.failure_cause import Cause, Kind
from keepstep.resilience.restart_policy import RestartPolicy
from keepstep.resilience.survivors.coordinator import Coordinator, Network
from keepstep.resilience.survivors.membership import Fewest

REPLACEABLE: frozenset[Kind] = frozenset({"crash", "hang", "peer"})
"""What one process may suffer while the others are well. Anything else would meet its replacement too."""
Verdict = Literal["replace", "leave out", "fault"]


class Supervisor:
    """Holds the coordinator of an attempt, and decides about processes that end."""

    cut_off = False
    """Whether this node has to join the others again."""

    def __init__(
        self,
        scratch: Path,
        processes: int,
        settings: ResilienceConfig,
        on_event: Callable[..., None],
        network: Network | None = None,
        group: NodeGroup = NodeGroup(),  # noqa: B008 - frozen
    ) -> None:
        """`processes` of each node train; the spares of `settings` wait until one of these is lost."""
        self._path, self._processes, self._on_event = scratch / "membership", processes * group.max_nodes, on_event
        self._network, self._group = network, group
        self._fewest: Fewest | None = None
        if group.min_nodes < group.max_nodes:
            self._fewest = Fewest(group.min_nodes, group.min_nodes * processes, processes + settings.spares)
        self._max_restarts = settings.max_restarts
        self._policies = [RestartPolicy(self._max_restarts) for _ in range(processes + settings.spares)]
        self._coordinator: Coordinator | None = None
        self._causes: dict[int, str] = {}
        """Why processes ended, until their membership has ended too."""
        self.left_out: set[int] = set()
        """Processes that ended and are not replaced."""

    def begin_attempt(self) -> dict[str, str]:
        """Start over with new replicas; returns their environment."""
        self.close()
        self.left_out.clear()
        self._coordinator = Coordinator(self._path, self._processes, self._network, self._fewest)
        secret = {REPLICA_SECRET: self._network.secret.decode()} if self._network else {}
        return {COORDINATOR: self._coordinator.address, **secret}

    def judge(self, cause: Cause, local_rank: int, step: int) -> Verdict:
        """What follows from the end of a process. `step` is the newest that it has finished, or -1."""
        assert self._coordinator is not None
        self._causes[local_rank] = cause.message
        membership = self._coordinator.membership
        if membership.over and membership.leader != local_rank:
            return "leave out"
        if cause.kind not in REPLACEABLE or not self._coordinator.can_replace:
            return "fault"
        if membership.is_spare(local_rank):
            # It had built the run and waited: what ended it says nothing about the next one.
            self._policies[local_rank] = RestartPolicy(self._max_restarts)
        decision = self._policies[local_rank].decide(cause, step)
        return "replace" if decision.restart else "leave out"

    def record_events(self) -> None:
        """Report changes of membership since the last call."""
        while self._coordinator is not None:
            try:
                event = self._coordinator.events.get_nowait()
            except queue.Empty:
                return
            if "what" in event:
                event["what"] = self._causes.pop(event["replica"], event["what"])
            if "stall_s" in event:
                changed = f"replica {event['replica']} {event['kind']} at step {event['step']}"
                _print(f"{changed}: {event['ranks']} train, stalled for {event['stall_s']:.2f} s")
            elif event["kind"] == "paused":
                wait = f"waiting for {format_seconds(self._group.join_timeout_s)}, then the run saves and stops"
                _print(f"paused at step {event['step']}: fewer than {event['min_nodes']} nodes are left; {wait}")
            self._on_event(**event)

    @property
    def waited_in_vain(self) -> bool:
        """Whether there have been too few nodes for so long that the run saves and stops."""
        return self._coordinator is not None and self._coordinator.paused_s > self._group.join_timeout_s

    def close(self) -> None:
        """End the attempt."""
        if self._coordinator is not None:
            self._coordinator.close()
            self.record_events()
            self._coordinator = None


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_stopped(pid: int) -> bool:
    """Whether a signal holds the process: the kernel knows immediately, where a heartbeat needs seconds."""
    status = proc.status(pid) if pid else None
    return status is not None and status.state in ("T", "t")
