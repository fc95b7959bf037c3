"""The coordinator: a thread of the agent that connects the replicas to the membership."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.membership import Membership

SEND_TIMEOUT_S = 1.0
"""Messages are small: a replica that does not take one for so long is stopped or hangs."""


@dataclass(frozen=True)
class Network:
    """How replicas of other nodes reach the coordinator."""

    host: str
    """The name or address of this node, as the others know it."""
    secret: bytes = field(repr=False)
    """What they prove to know."""


class Coordinator:
    """Listens for the replicas of one attempt until it is closed: at `path`, or with a `network` on that."""

    def __init__(self, path: Path, expected: int, first: int | None = None, network: Network | None = None) -> None:
        """`expected` replicas train. The `first` one has the state that the others copy, if that is known."""
        self.path, self._network = path, network
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """Changes of membership that the agent has not recorded yet."""
        self._connections: dict[int, socket.socket] = {}
        self._membership = Membership(expected, self._send, self._note, first)
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
    def members(self) -> tuple[int, ...]:
        """The replicas that step."""
        return self._membership.members

    @property
    def can_replace(self) -> bool:
        """Whether living members could serve a replacement."""
        return bool(self.members) and not (self._membership.over or self._membership.all_lost)

    @property
    def over(self) -> bool:
        """Whether the run has finished, but for what the leader still writes."""
        return self._membership.over

    @property
    def leader(self) -> int | None:
        """The replica that writes for all."""
        return self._membership.leader

    @property
    def leader_of_last_step(self) -> int | None:
        """The leader when a step was committed last: nobody has taken part for longer."""
        return self._membership.leader_of_last_step

    def is_spare(self, number: int) -> bool:
        """Whether this replica waits to take the place of another one, or did so to its end."""
        return self._membership.is_spare(number)

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
        self._selector.register(connection, selectors.EVENT_READ, (wire.Inbox(), []))

    def _read(self, key: selectors.SelectorKey) -> None:
        connection: socket.socket = key.fileobj  # type: ignore[assignment] # only sockets are registered
        inbox, numbers = key.data
        try:
            messages = inbox.read(connection)
        except OSError:
            self._selector.unregister(connection)
            connection.close()
            # Not where its successor has connected already.
            if numbers and self._connections.get(numbers[0]) is connection:
                self._membership.lost(numbers[0])
            return
        for message in messages:
            if message["kind"] == "hello":
                numbers.append(message["number"])
                self._membership.lost(numbers[0])
                self._connections[numbers[0]] = connection
                self._membership.hello(numbers[0], message["address"])
            elif self._connections.get(numbers[0]) is connection:
                self._membership.receive(numbers[0], message)

    def _send(self, number: int, message: wire.Message) -> None:
        # A replica that cannot be reached is lost. Its connection says so in a moment, or the agent ends its process.
        with suppress(OSError):
            wire.send(self._connections[number], message)

    def _note(self, **facts: Any) -> None:
        self.events.put(facts)
