"""Where the nodes of a run meet before each attempt: who takes part, in which order, and how processes find each other.

One node needs no network for that. Several meet through torchrun's own rendezvous, which lets nodes leave and join
between attempts; every attempt gets a store of its own, so that no key of an earlier one can leak into it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keepstep.core.errors import HardwareError
from keepstep.core.nodes import NodeGroup
from keepstep.core.ranks import STORE_FILE

LAST_CALL_S = 5
"""Once the fewest nodes that may run are there: how long the others are waited for."""
KEEP_ALIVE_S = 2
KEEP_ALIVE_MISSED = 3
"""A node that misses this many signs of life is taken to be gone."""
RETRY_S = 1.0
SAY_S = 1.0
"""Between two times that a node says that it waits for data."""
HEARD_S = 3.0
"""How long that holds for the others."""
REACH_S = 5.0


@dataclass(frozen=True)
class Meeting:
    """The nodes of one attempt, as this node needs to know them."""

    node_rank: int
    nodes: int
    environment: dict[str, str]
    """What lets the processes find each other."""


class Meetings(Protocol):
    """Brings the nodes together again and again."""

    def next(self) -> Meeting:
        """The nodes of the next attempt; returns when enough are there. A signal handler may end it by an error."""

    def others_wait(self) -> bool:
        """Whether a node waits to take part, so that this attempt should end."""

    def say_data_wait(self) -> None:
        """Tell the other nodes that this one waits for data, and that their silence is theirs for it."""

    def hears_data_wait(self) -> bool:
        """Whether another node said so lately; to be asked some seconds before the answer is needed."""

    def close(self, done: bool) -> None:
        """This node takes part no more; `done` tells the others that the run is over."""


class Alone:
    """The only node: its processes meet in a file."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._attempts = 0

    def next(self) -> Meeting:
        """At once."""
        self._attempts += 1
        return Meeting(0, 1, {STORE_FILE: str(self._scratch / f"store-{self._attempts}")})

    def others_wait(self) -> bool:
        """Never."""
        return False

    def say_data_wait(self) -> None:
        """Nobody is there to be told."""

    def hears_data_wait(self) -> bool:
        """Never."""
        return False

    def close(self, done: bool) -> None:
        """Nothing is held."""


class Elastic:
    """Several nodes, between a fewest and a most, through torchrun's rendezvous."""

    def __init__(self, group: NodeGroup) -> None:
        # Workers say what went wrong; the library's account of it would bury that under pages.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        # With a shared store, keys of an earlier attempt leak into the next one and restarts race.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._group = group
        self._handler: Any = None
        self._waits: DataWaits | None = None

    def next(self) -> Meeting:
        """Waits up to the group's limit; a lost connection to the meeting point is tried again until then."""
        deadline = time.monotonic() + self._group.join_timeout_s
        while True:
            try:
                if self._handler is None:
                    if self._group.is_host is False:
                        _reach(self._group.endpoint)
                    self._handler = self._connect()
                info = self._handler.next_rendezvous()
                store = info.bootstrap_store_info
                where = {"MASTER_ADDR": store.master_addr, "MASTER_PORT": str(store.master_port)}
                self._waits = DataWaits(info.store)
                return Meeting(info.rank, info.world_size, where)
            except Exception as error:
                # Torch raises its own errors, RuntimeErrors and OSErrors here, depending on what broke and when.
                self._handler = None
                if type(error).__name__ == "RendezvousClosedError":
                    raise HardwareError("the other nodes have ended the run", "see their messages") from error
                if time.monotonic() > deadline:
                    raise HardwareError(
                        f"the nodes could not meet at {self._group.endpoint}: {error}",
                        "check that this address can be reached from every node",
                    ) from error
                time.sleep(RETRY_S)

    def others_wait(self) -> bool:
        """Whether a node waits at the meeting point; one that cannot be reached has nobody waiting."""
        try:
            return self._handler is not None and self._handler.num_nodes_waiting() > 0
        except Exception:
            # The node that holds the meeting point is gone or cut off. Training tells soon enough whether that matters.
            return False

    def say_data_wait(self) -> None:
        """Through the store of the meeting point."""
        if self._waits is not None:
            self._waits.say()

    def hears_data_wait(self) -> bool:
        """Through the store of the meeting point."""
        return self._waits is not None and self._waits.hears()

    def close(self, done: bool) -> None:
        """Close the rendezvous when the run is over, else only leave it."""
        # Dropped, it sends no more signs of life. Torch's own way to leave closes it, and then nobody could meet again.
        handler, self._handler = self._handler, None
        if handler is None or not done:
            return
        # The store's host may have left first.
        with suppress(Exception):
            handler.shutdown()

    def _connect(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        group = self._group
        settings: dict[str, Any] = {
            "read_timeout": min(60, group.join_timeout_s),
            "join_timeout": group.join_timeout_s,
            "last_call_timeout": LAST_CALL_S,
            "keep_alive_interval": KEEP_ALIVE_S,
            "keep_alive_max_attempt": KEEP_ALIVE_MISSED,
        }
        if group.is_host is not None:
            settings["is_host"] = group.is_host
        return get_rendezvous_handler(
            RendezvousParameters(
                "c10d",
                group.endpoint,
                group.run_id,
                group.min_nodes,
                group.max_nodes,
                local_addr=own_address(group.endpoint),
                **settings,
            )
        )


class DataWaits:
    """A count that grows as long as some node waits for data: no clocks need to agree."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._next_s = 0.0
        self._count: int | None = None
        self._grew_s = 0.0

    def say(self) -> None:
        """Count on, once a second at most."""
        self._add(1)

    def hears(self) -> bool:
        """Whether the count grew lately."""
        count, now = self._add(0), time.monotonic()
        if count is not None and count != self._count:
            self._count, self._grew_s = count, now
        return now - self._grew_s < HEARD_S

    def _add(self, number: int) -> int | None:
        if time.monotonic() < self._next_s:
            return None
        self._next_s = time.monotonic() + SAY_S
        try:
            return int(self._store.add("data_waits", number))
        except Exception:
            # The node that holds the meeting point is gone or cut off: then nothing is heard, and silence is a hang.
            return None


def _reach(endpoint: str) -> None:
    """Raise where nobody listens at the meeting point: torch would wait there for a minute, deaf to signals."""
    host, _, port = endpoint.rpartition(":")
    socket.create_connection((host, int(port)), REACH_S).close()


def own_address(endpoint: str) -> str | None:
    """This node's address on the network that leads to the meeting point; None where that cannot be told."""
    host, _, port = endpoint.rpartition(":")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only chooses the way.
            probe.connect(address)
            own: str = probe.getsockname()[0]
            return own
    except OSError:
        return None
