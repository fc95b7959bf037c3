"""Sums over the members of one epoch, through direct connections that any of them can leave at any time."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from keepstep.core.failpoints import reach

Numbers = NDArray[np.int64]
SLICE = 1 << 20
"""Numbers summed at a time: what arrives from others needs memory for this many only."""
BUFFER_BYTES = 1 << 22


class PeerLostError(Exception):
    """The connection to a member broke; `peer` is its rank."""

    def __init__(self, peer: int) -> None:
        super().__init__(f"lost rank {peer}")
        self.peer = peer


class InterruptedSumError(Exception):
    """The coordinator has something to say."""


class Exchange:
    """One member's connections to all others. `control` is the connection to the coordinator."""

    def __init__(self, control: socket.socket, rank: int, peers: Mapping[int, socket.socket]) -> None:
        """`peers` by rank."""
        self._control, self._rank, self._peers = control, rank, dict(peers)
        part = -(-SLICE // (len(self._peers) + 1))
        # Allocated once: the system takes longer to give new memory than to fill it.
        self._arrived = {peer: np.empty(part, np.int64) for peer in self._peers}
        for connection in self._peers.values():
            connection.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)

    def close(self) -> None:
        """Leave: the others notice."""
        for connection in self._peers.values():
            connection.close()

    def sum_(self, numbers: Numbers) -> None:
        """Replace `numbers` by their sum over all members: whole numbers, so no order of adding matters."""
        if self._peers:
            for start in range(0, len(numbers), SLICE):
                self._sum_slice(numbers[start : start + SLICE])

    def _sum_slice(self, numbers: Numbers) -> None:
        """Each member adds up one part, then all members collect the sums of the parts."""
        parts = np.array_split(numbers, len(self._peers) + 1)
        own = parts[self._rank]
        arrived = {peer: self._arrived[peer][: len(own)] for peer in self._peers}
        self._transfer({peer: parts[peer] for peer in self._peers}, arrived)
        for others in arrived.values():
            own += others
        reach("sum_half")
        self._transfer(dict.fromkeys(self._peers, own), {peer: parts[peer] for peer in self._peers})

    def _transfer(self, outgoing: Mapping[int, Numbers], incoming: Mapping[int, Numbers]) -> None:
        """Send and receive at the same time, until all is there or a message of the coordinator comes."""
        sends = {peer: numbers.view(np.uint8).data for peer, numbers in outgoing.items()}
        receives = {peer: numbers.view(np.uint8).data for peer, numbers in incoming.items()}
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for peer, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            pending = {peer for peer in self._peers if sends[peer] or receives[peer]}
            while pending:
                for key, events in selector.select():
                    if key.data is None:
                        raise InterruptedSumError
                    if not self._move(key.data, events, sends, receives):
                        pending.discard(key.data)
                    self._watch(selector, key.data, bool(sends[key.data]), bool(receives[key.data]))

    def _watch(self, selector: selectors.BaseSelector, peer: int, sends: bool, receives: bool) -> None:
        """Listen only to what matters: a peer that is ahead sends what belongs to the next sum."""
        events = selectors.EVENT_READ * receives | selectors.EVENT_WRITE * sends
        if events:
            selector.modify(self._peers[peer], events, peer)
        else:
            selector.unregister(self._peers[peer])

    def _move(self, peer: int, events: int, sends: dict[int, memoryview], receives: dict[int, memoryview]) -> bool:
        """Move what can be moved; False when nothing is left to move."""
        connection = self._peers[peer]
        try:
            if events & selectors.EVENT_WRITE and sends[peer]:
                sends[peer] = sends[peer][connection.send(sends[peer]) :]
            if events & selectors.EVENT_READ and receives[peer]:
                count = connection.recv_into(receives[peer])
                if not count:
                    raise PeerLostError(peer)
                receives[peer] = receives[peer][count:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise PeerLostError(peer) from error
        return bool(sends[peer] or receives[peer])
