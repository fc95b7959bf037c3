"""The agent's part: a replica that ends is replaced while the others continue, as long as one of them has the state."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from keepstep.config.schema import ResilienceConfig
from keepstep.core import proc
from keepstep.core.ranks import COORDINATOR, REPLICA_SECRET
from keepstep.resilience.failure_cause import Cause, Kind
from keepstep.resilience.restart_policy import RestartPolicy
from keepstep.resilience.survivors.coordinator import Coordinator, Network

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
        nodes: int = 1,
    ) -> None:
        """`processes` of each node train; the spares of `settings` wait until one of these is lost."""
        self._path, self._processes, self._on_event = scratch / "membership", processes * nodes, on_event
        self._network = network
        self._max_restarts = settings.max_restarts
        self._policies = [RestartPolicy(self._max_restarts) for _ in range(processes + settings.spares)]
        self._coordinator: Coordinator | None = None
        self._last_leader: int | None = None
        """Of the attempt before: its memory holds the newest snapshot."""
        self._causes: dict[int, str] = {}
        """Why processes ended, until their membership has ended too."""
        self.left_out: set[int] = set()
        """Processes that ended and are not replaced."""

    def begin_attempt(self) -> dict[str, str]:
        """Start over with new replicas; returns their environment."""
        self.close()
        self.left_out.clear()
        first = self._last_leader
        if self._network and (first is None or first >= len(self._policies)):
            # One of this node: the others may be gone for good.
            first = 0
        self._coordinator = Coordinator(self._path, self._processes, first, self._network)
        secret = {REPLICA_SECRET: self._network.secret.decode()} if self._network else {}
        return {COORDINATOR: self._coordinator.address, **secret}

    def judge(self, cause: Cause, local_rank: int, step: int) -> Verdict:
        """What follows from the end of a process. `step` is the newest that it has finished, or -1."""
        assert self._coordinator is not None
        self._causes[local_rank] = cause.message
        if self._coordinator.over and self._coordinator.leader != local_rank:
            return "leave out"
        if cause.kind not in REPLACEABLE or not self._coordinator.can_replace:
            return "fault"
        if self._coordinator.is_spare(local_rank):
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
            # Spares delay nobody.
            if "stall_s" in event:
                print(
                    f"replica {event['replica']} {event['kind']} at step {event['step']}: {event['ranks']} train, "
                    f"stalled for {event['stall_s']:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
            self._on_event(**event)

    def close(self) -> None:
        """End the attempt."""
        if self._coordinator is not None:
            self._coordinator.close()
            self._last_leader = self._coordinator.leader_of_last_step
            self.record_events()
            self._coordinator = None


def is_stopped(pid: int) -> bool:
    """Whether a signal holds the process: the kernel knows immediately, where a heartbeat needs seconds."""
    status = proc.status(pid) if pid else None
    return status is not None and status.state in ("T", "t")
