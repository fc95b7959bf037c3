"""Rendezvous: before each attempt, which nodes take part, in which order, and how their processes find each other.

A single node needs no network for that. Several nodes use torchrun's c10d rendezvous, which lets nodes leave and join
between attempts; only nodes that know the run's secret reach its store (see join_gate.py). The processes of every
attempt get a store of their own, so that keys of an earlier attempt cannot leak into it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from keepstep.core.errors import HardwareError
from keepstep.core.ranks import STORE_FILE, NodeGroup, own_address
from keepstep.resilience.join_gate import Gate, Tunnel

LAST_CALL_S = 5
"""How long to wait for more nodes once the minimum has arrived."""
KEEP_ALIVE_S = 2
KEEP_ALIVE_MISSED = 3
"""A node that misses this many keep-alives is considered lost."""
RETRY_S = 1.0
REPORT_INTERVAL_S = 1.0
"""Between two reports of a node that it waits for data."""
REPORT_VALID_S = 3.0
"""How long such a report holds for the other nodes."""
STORE_TIMEOUT_S = 60


@dataclass(frozen=True)
class RendezvousResult:
    """The nodes of one attempt, as seen from this node."""

    node_rank: int
    nodes: int
    environment: dict[str, str]
    """Environment variables with which the processes find each other."""


class Rendezvous:
    """Brings the nodes together before each attempt: here only one, whose processes find each other through a file."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._attempts = 0

    def next(self) -> RendezvousResult:
        """Wait for the nodes of the next attempt. A signal handler may end the wait by raising."""
        self._attempts += 1
        return RendezvousResult(0, 1, {STORE_FILE: str(self._scratch / f"store-{self._attempts}")})

    def publish(self, environment: dict[str, str]) -> None:
        """Tell the other nodes where the processes of this attempt find their coordinator."""

    def nodes_waiting(self) -> bool:
        """Whether another node waits to join, so that this attempt should end."""
        return False

    def report_data_wait(self) -> None:
        """Tell the other nodes that this one waits for data, so that their silence is not counted as a hang."""

    def data_wait_reported(self) -> bool:
        """Whether another node reported that recently; start to ask some seconds before the answer is needed."""
        return False

    def close(self, done: bool) -> None:
        """Leave; `done` tells the other nodes that the run is over."""


class ElasticRendezvous(Rendezvous):
    """Several nodes, between a minimum and a maximum, through torchrun's c10d rendezvous."""

    def __init__(self, group: NodeGroup) -> None:
        # Workers report what went wrong; the library's log would bury that under pages.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        # With a shared store, keys of an earlier attempt leak into the next one, and restarts race.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._group = group
        self._handler: Any = None
        self._store: Any = None
        self._hosted: tuple[Any, Gate] | None = None
        self._tunnel: Tunnel | None = None
        self._asked_s = self._grew_s = 0.0
        self._data_waits: int | None = None

    def next(self) -> RendezvousResult:
        """Wait up to the group's timeout; a lost connection to the endpoint is tried again until then."""
        deadline = time.monotonic() + self._group.join_timeout_s
        while True:
            try:
                if self._handler is None:
                    self._handler = self._connect()
                info = self._handler.next_rendezvous()
                store = info.bootstrap_store_info
                where = {"MASTER_ADDR": store.master_addr, "MASTER_PORT": str(store.master_port)}
                self._store, self._asked_s, self._grew_s, self._data_waits = info.store, 0.0, 0.0, None
                return RendezvousResult(info.rank, info.world_size, where)
            except Exception as error:
                # Depending on what broke and when, torch raises its own errors, RuntimeErrors or OSErrors.
                self._handler = None
                if type(error).__name__ == "RendezvousClosedError":
                    raise HardwareError("the other nodes have ended the run", "see their messages") from error
                if time.monotonic() > deadline:
                    message = f"rendezvous at {self._group.endpoint} failed: {error}"
                    raise HardwareError(message, "check that every node can reach this address") from error
                time.sleep(RETRY_S)

    def nodes_waiting(self) -> bool:
        """Whether a node waits at the endpoint; none does where that cannot be reached."""
        try:
            return self._handler is not None and self._handler.num_nodes_waiting() > 0
        except Exception:
            # The node that hosts the endpoint is gone or cut off. Training fails soon if that matters.
            return False

    def report_data_wait(self) -> None:
        """Increment a counter in the store of the rendezvous, so that no clocks need to agree."""
        self._add_data_waits(1)

    def data_wait_reported(self) -> bool:
        """Whether the counter grew recently."""
        count, now = self._add_data_waits(0), time.monotonic()
        if count is not None and count != self._data_waits:
            self._data_waits, self._grew_s = count, now
        return now - self._grew_s < REPORT_VALID_S

    def _add_data_waits(self, number: int) -> int | None:
        """Add to the counter and return it; None if that was done less than a second ago, or cannot be done."""
        if time.monotonic() < self._asked_s + REPORT_INTERVAL_S:
            return None
        self._asked_s = time.monotonic()
        try:
            return int(self._store.add("data_waits", number))
        except Exception:
            # The node that hosts the endpoint is gone or cut off: without reports, silence counts as a hang.
            return None

    def close(self, done: bool) -> None:
        """Close the rendezvous when the run is over, else only leave it."""
        # A dropped handler sends no more keep-alives. Its own shutdown would close the rendezvous for all nodes.
        handler, self._handler = self._handler, None
        if handler is not None and done:
            # The store's host may have left first.
            with suppress(Exception):
                handler.shutdown()

    def _host_store(self) -> Any:
        """The store of the rendezvous, which strangers do not reach, and the gate to it; created once."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it implicitly

        if self._hosted is None:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port, timeout = int(listener.getsockname()[1]), timedelta(seconds=STORE_TIMEOUT_S)
                gate = Gate(_split(self._group.endpoint)[1], self._group.secret, port)
                # The store takes over the listening socket; one of its own would be open to the network.
                options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
                self._hosted = TCPStore("127.0.0.1", port, None, True, timeout, **options), gate
        return self._hosted[0]

    def _join_store(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it implicitly

        if self._tunnel is None:
            self._tunnel = Tunnel(_split(self._group.endpoint), self._group.secret)
        # Raises if nobody answers there: torch would wait for a minute and ignore signals.
        self._tunnel.check()
        timeout = timedelta(seconds=min(STORE_TIMEOUT_S, self._group.join_timeout_s))
        return TCPStore("127.0.0.1", self._tunnel.port, None, False, timeout, wait_for_workers=False)

    def _connect(self) -> Any:
        # Imported before the gate opens: they take seconds, and longer next to a thread that answers strangers.
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        group = self._group
        store = self._host_store() if group.is_host else self._join_store()
        settings: dict[str, Any] = {
            "local_addr": own_address(*_split(group.endpoint)),
            "join_timeout": group.join_timeout_s,
            "last_call_timeout": LAST_CALL_S,
            "keep_alive_interval": KEEP_ALIVE_S,
            "keep_alive_max_attempt": KEEP_ALIVE_MISSED,
        }
        nodes = (group.min_nodes, group.max_nodes)
        parameters = RendezvousParameters("c10d", group.endpoint, group.run_id, *nodes, **settings)
        return create_handler(store, C10dRendezvousBackend(store, group.run_id), parameters)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
