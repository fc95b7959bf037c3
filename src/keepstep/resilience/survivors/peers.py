"""The connections of a process to those of its rank in the other members of an epoch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait

from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.exchange import PeerLostError
from keepstep.resilience.survivors.wire import Message


class Peers:
    """Listens for others, and connects to them in each epoch."""

    def __init__(self, coordinator: str, name: str, control: socket.socket) -> None:
        """`name` differs between the processes of a node; `control` is the connection to the coordinator."""
        self._control = control
        self.listener, self.address = wire.listen_for_peers(coordinator, name, control)
        self._early: list[tuple[Message, socket.socket]] = []
        """Calls of members of an epoch that this process has not heard of yet."""

    def close(self) -> None:
        """Nobody reaches this process any more."""
        self.listener.close()

    def connect(
        self, epoch: int, rank: int, addresses: Sequence[str], raise_if_changed: Callable[[], None]
    ) -> dict[int, socket.socket]:
        """Call those who have been members for longer, and wait for the calls of the others; connections by rank.

        `addresses` are those of all members. PeerLostError where one of them does not answer. `raise_if_changed` ends
        the wait when the coordinator starts another epoch.
        """
        peers: dict[int, socket.socket] = {}
        try:
            for each, address in enumerate(addresses[:rank]):
                self._call(each, address, {"kind": "member", "epoch": epoch, "rank": rank}, peers)
            peers |= {message["rank"]: caller for message, caller in self._early if message["epoch"] == epoch}
            self._early = [each for each in self._early if each[0]["epoch"] > epoch]
            while len(peers) < len(addresses) - 1:
                raise_if_changed()
                if self._control not in wait([self._control, self.listener]):
                    self._accept(epoch, peers)
        except BaseException:
            for connection in peers.values():
                connection.close()
            raise
        return peers

    def _call(self, rank: int, address: str, hello: Message, peers: dict[int, socket.socket]) -> None:
        try:
            peers[rank] = wire.connect(address)
            wire.send(peers[rank], hello)
        except OSError as error:
            raise PeerLostError(rank) from error

    def _accept(self, epoch: int, peers: dict[int, socket.socket]) -> None:
        caller, _ = self.listener.accept()
        with suppress(ConnectionError):
            message = wire.receive(caller)
            if message["kind"] == "member" and message["epoch"] == epoch:
                peers[message["rank"]] = caller
                return
            if message["kind"] == "member" and message["epoch"] > epoch:
                # It has heard of the next epoch first.
                self._early.append((message, caller))
                return
        caller.close()
