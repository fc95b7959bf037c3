"""The coordinator: a thread of the agent that connects the replicas to the membership."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.membership import Fewest, Membership

SEND_TIMEOUT_S = 1.0
"""Messages are small: a replica that does not take one for so long is stopped or hangs."""


@dataclass(frozen=True)
class Network:
    """How replicas of other nodes reach the coordinator."""

    host: str
    """The name or address of this node, as the others know it."""
    secret: bytes = field(repr=False)
    """What they prove to know."""


@dataclass
class _ReplicaConnections:
    """The processes of one replica, by their rank in it."""

    size: int
    name: str
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)
    said: dict[int, wire.Message] = field(default_factory=dict)
    """What each process has said last."""

    def heard(self, rank: int, message: wire.Message) -> wire.Message | None:
        """The message of the whole replica, once all its processes have said the same; checksums are put together."""
        self.said[rank] = message
        spoken = [{**each, "checksum": ""} for each in self.said.values()]
        if len(spoken) < self.size or any(each != spoken[0] for each in spoken):
            return None
        checksum = " ".join(self.said[each].get("checksum", "") for each in range(self.size))
        self.said.clear()
        return {**message, "checksum": checksum}


class Coordinator:
    """Listens for the replicas of one attempt until it is closed: at `path`, or with a `network` on that."""

    def __init__(
        self,
        path: Path,
        expected: int,
        network: Network | None = None,
        fewest: Fewest | None = None,
    ) -> None:
        """See `Membership` for `expected` and `fewest`."""
        self.path, self._network = path, network
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """Changes of membership that the agent has not recorded yet."""
        self._connections: dict[int, _ReplicaConnections] = {}
        self.membership = Membership(expected, self._send, self._note, fewest)
        self._selector = selectors.DefaultSelector()
        self._listener = wire.NetworkListener() if network else wire.listen(path)
        self._admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        """Connections from the network that have proven themselves."""
        self.address = str(path)
        """Where replicas connect."""
        if isinstance(self._listener, wire.NetworkListener) and network:
            self.address = wire.network_address(network.host, self._listener.port)
        self._wakeup, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    @property
    def can_replace(self) -> bool:
        """Whether living members could serve a replacement."""
        return bool(self.membership.members) and not (self.membership.over or self.membership.all_lost)

    @property
    def paused_s(self) -> float:
        """For how long the members have waited for more nodes."""
        paused_at = self.membership.paused_at
        return time.monotonic() - paused_at if paused_at is not None else 0.0

    def close(self) -> None:
        """Stop, and close all connections: nothing can be committed any more."""
        self._wakeup.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr] # only sockets are registered
        self._selector.close()
        while not self._admitted.empty():
            self._admitted.get().close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    if not self._woken.recv(1):
                        return
                    self._add(self._admitted.get())
                elif key.fileobj is self._listener:
                    # One that is gone before it was accepted does not matter.
                    with suppress(ConnectionError):
                        self._accept()
                else:
                    self._read(key)

    def _accept(self) -> None:
        connection, _ = socket.socket.accept(self._listener)
        if self._network:
            # A stranger who says nothing must not hold up the others.
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
        else:
            self._add(connection)

    def _admit(self, connection: socket.socket) -> None:
        assert self._network is not None
        if wire.admitted(connection, self._network.secret):
            self._admitted.put(connection)
            with suppress(OSError):
                self._wakeup.send(b"+")

    def _add(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ, (wire.Inbox(), {}))

    def _read(self, key: selectors.SelectorKey) -> None:
        connection: socket.socket = key.fileobj  # type: ignore[assignment] # only sockets are registered
        inbox, hello = key.data
        try:
            messages = inbox.read(connection)
        except OSError:
            self._selector.unregister(connection)
            connection.close()
            if self._belongs(hello, connection):
                self._drop(hello["number"])
            return
        for message in messages:
            if message["kind"] == "hello":
                hello.update(message)
                self._connected(hello, connection)
            elif not self._belongs(hello, connection):
                continue
            elif message["kind"] in ("broken", "asked_to_stop"):
                self.membership.receive(hello["number"], message)
            elif together := self._connections[hello["number"]].heard(hello["rank"], message):
                self.membership.receive(hello["number"], together)

    def _belongs(self, hello: wire.Message, connection: socket.socket) -> bool:
        """Whether a connection is of a replica whose successor has not connected yet."""
        replica = self._connections.get(hello.get("number", -1))
        return replica is not None and replica.sockets.get(hello["rank"]) is connection

    def _connected(self, hello: wire.Message, connection: socket.socket) -> None:
        number, rank = hello["number"], hello["rank"]
        replica = self._connections.get(number)
        if replica is None or replica.name != hello["name"] or rank in replica.sockets:
            self._drop(number)
            replica = self._connections[number] = _ReplicaConnections(hello["size"], hello["name"])
        replica.sockets[rank], replica.addresses[rank] = connection, hello["address"]
        replica.snapshots[rank] = hello["snapshot"]
        if len(replica.sockets) == replica.size:
            addresses = [replica.addresses[each] for each in range(replica.size)]
            # All of them need it.
            self.membership.hello(number, addresses, min(replica.snapshots.values()))

    def _drop(self, number: int) -> None:
        """A process of a replica is gone, and the replica with it."""
        if number in self._connections:
            self.membership.lost(number)
            del self._connections[number]

    def _send(self, number: int, message: wire.Message) -> None:
        for connection in self._connections[number].sockets.values():
            # A replica that cannot be reached is lost. Its connection says so in a moment, or the agent ends it.
            with suppress(OSError):
                wire.send(connection, message)

    def _note(self, **facts: Any) -> None:
        self.events.put(facts)
