"""A node whose replicas are coordinated by another node: how it finds the coordinator, and what follows from losses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.ranks import COORDINATOR, LAUNCH, REPLICA_SECRET, NodeGroup
from keepstep.resilience.failure_cause import Cause
from keepstep.resilience.rendezvous import RETRY_S, ElasticRendezvous, Rendezvous, RendezvousResult
from keepstep.resilience.restart_policy import RestartPolicy
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.control import RunOverError
from keepstep.resilience.survivors.coordinator import Network
from keepstep.resilience.survivors.supervisor import REPLACEABLE, Supervisor, Verdict

_KEY = "keepstep/coordinator"
_NAMES = (COORDINATOR, REPLICA_SECRET, LAUNCH)


@dataclass(frozen=True)
class _Coordinator:
    environment: dict[str, str]

    @property
    def answers(self) -> bool:
        """Whether this node reaches the coordinator."""
        with suppress(ConnectionError):
            secret = self.environment[REPLICA_SECRET].encode()
            wire.connect_network(self.environment[COORDINATOR], secret).close()
            return True
        return False


class SurvivorRendezvous(ElasticRendezvous):
    """Nodes whose replicas outlive each other do not wait for each other: each looks for the coordinator by itself."""

    def __init__(self, group: NodeGroup, node: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """`is_over` says whether the run has finished without this node."""
        super().__init__(group)
        self._node, self._is_over, self.group = node, is_over, group
        self.host = group.endpoint.rpartition(":")[0]
        """The first node, as the others know it."""
        self.coordinator: _Coordinator | None = None

    def next(self) -> RendezvousResult:
        """On the host immediately; on another node as soon as a coordinator answers, up to the group's timeout."""
        # Those that the run starts with.
        nodes = self._group.min_nodes
        if self._group.is_host:
            self._store = self._host_store()
            return RendezvousResult(self._node, nodes, {})
        deadline, why = time.monotonic() + self._group.join_timeout_s, "no coordinator answers"
        while time.monotonic() < deadline:
            if self._is_over():
                raise RunOverError("the run ended before this node had joined the others")
            try:
                self._store = self._join_store()
                if self._store.check([_KEY]):
                    values = self._store.get(_KEY).decode().split()
                    self.coordinator = _Coordinator(dict(zip(_NAMES, values, strict=True)))
                    if self.coordinator.answers:
                        return RendezvousResult(self._node, nodes, self.coordinator.environment)
            except Exception as error:
                # Depending on what broke and when, torch raises its own errors, RuntimeErrors or OSErrors.
                why = str(error)
            time.sleep(RETRY_S)
        message = f"the first node at {self._group.endpoint} cannot be reached: {why}"
        raise HardwareError(message, "check that every node can reach this address")

    def publish(self, environment: dict[str, str]) -> None:
        """On the host: where the coordinator of the attempt is."""
        self._store.set(_KEY, " ".join(environment[name] for name in _NAMES))


class RemoteSupervisor:
    """Replaces processes of this node as long as it reaches the coordinator; else it joins the others again."""

    waited_in_vain = False
    """The coordinator's node knows how many nodes there are."""

    def __init__(self, rendezvous: SurvivorRendezvous, slots: int, max_restarts: int) -> None:
        self._rendezvous = rendezvous
        self._policies = [RestartPolicy(max_restarts) for _ in range(slots)]
        self.left_out: set[int] = set()
        self.cut_off = False
        """Whether this node has to join the others again."""

    def begin_attempt(self) -> dict[str, str]:
        """Start over with new replicas, whose environment the rendezvous has found."""
        self.left_out.clear()
        self.cut_off = False
        return {}

    def judge(self, cause: Cause, local_rank: int, step: int) -> Verdict:
        """What follows from the end of a process. `step` is the newest that it has finished, or -1."""
        if cause.kind not in REPLACEABLE:
            return "fault"
        coordinator = self._rendezvous.coordinator
        if coordinator is None or not coordinator.answers:
            self.cut_off = True
            return "leave out"
        return "replace" if self._policies[local_rank].decide(cause, step).restart else "fault"

    def record_events(self) -> None:
        """The coordinator's node reports changes."""

    def close(self) -> None:
        """End the attempt."""


def make_supervisor(
    rendezvous: Rendezvous,
    scratch: Path,
    processes: int,
    settings: ResilienceConfig,
    on_event: Callable[..., None],
) -> Supervisor | RemoteSupervisor | None:
    """What keeps the replicas of this node; None where all processes start and end together."""
    if isinstance(rendezvous, SurvivorRendezvous):
        silence_s = wire.LOST_S + wire.CONNECT_TIMEOUT_S
        if settings.hang_s <= silence_s:
            wrong = (
                f"resilience.hang_s is {settings.hang_s:g}, but replicas wait {silence_s:g} s for a node that is gone"
            )
            raise UsageError(wrong, "resilience.hang_s=10 or more")
        if not rendezvous.group.is_host:
            return RemoteSupervisor(rendezvous, processes + settings.spares, settings.max_restarts)
        network = Network(rendezvous.host, secrets.token_hex(16).encode())
        return Supervisor(scratch, processes, settings, on_event, network, rendezvous.group)
    return Supervisor(scratch, processes, settings, on_event) if settings.survive and processes > 1 else None
