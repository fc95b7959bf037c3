"""Sums over the members of one epoch, through direct connections that any of them can leave at any time."""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from keepstep.core.failpoints import reach
from keepstep.resilience.survivors.shared_numbers import Numbers
from keepstep.resilience.survivors.state_copy import part_bounds

if TYPE_CHECKING:
    from torch import Tensor

SLICE = 1 << 20
"""Numbers summed at a time: what arrives from others needs memory for this many only."""
FEW = 256
"""So many numbers are sent to everybody: one round takes less time than two smaller ones."""
BLOCK = 1 << 15
"""Numbers added at a time in shared memory: they stay in a core's cache."""
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

    def __init__(
        self,
        control: socket.socket,
        rank: int,
        peers: Mapping[int, socket.socket],
        shared: Mapping[int, Numbers] | None = None,
    ) -> None:
        """`peers` by rank; `shared` are the numbers of all members, where they are in memory that all of them read."""
        self._control, self._rank, self._peers = control, rank, dict(peers)
        self._shared = dict(shared or {})
        self.changed_numbers = False
        """Whether the last sum, if it was interrupted, has changed its numbers."""
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

    def sum_(self, numbers: Numbers | Tensor) -> None:
        """Replace `numbers` by their sum over all members: whole numbers, so no order of adding matters."""
        assert isinstance(numbers, np.ndarray)
        self.changed_numbers = False
        if not self._peers:
            return
        if len(numbers) <= FEW:
            self._sum_few(numbers)
        elif numbers is self._shared.get(self._rank):
            self._sum_shared(numbers)
        else:
            self.changed_numbers = True
            for start in range(0, len(numbers), SLICE):
                self._sum_slice(numbers[start : start + SLICE])

    def _sum_few(self, numbers: Numbers) -> None:
        arrived = {peer: self._arrived[peer][: len(numbers)] for peer in self._peers}
        self._transfer(dict.fromkeys(self._peers, numbers.copy()), arrived)
        for others in arrived.values():
            numbers += others

    def _sum_shared(self, numbers: Numbers) -> None:
        """Each member adds up one part in its own memory, then all members read the sums of the parts from there.

        Nobody changes a part that others still read: the next change comes after the commit, which waits for all.
        """
        self._wait_for_all()
        self.changed_numbers = True
        ranks = len(self._peers) + 1
        first, end = part_bounds(len(numbers), self._rank, ranks)
        for start in range(first, end, BLOCK):
            own = numbers[start : min(start + BLOCK, end)]
            for peer in self._peers:
                own += self._shared[peer][start : start + len(own)]
        reach("sum_half")
        self._wait_for_all()
        for peer in self._peers:
            part = slice(*part_bounds(len(numbers), peer, ranks))
            numbers[part] = self._shared[peer][part]

    def _wait_for_all(self) -> None:
        """Return when every member has called this."""
        self._sum_few(np.zeros(1, np.int64))

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
        # Most of it can be moved without waiting.
        pending = {peer for peer in self._peers if self._move(peer, sends, receives)}
        while pending:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            by_fd = {self._peers[peer].fileno(): peer for peer in pending}
            for fd, peer in by_fd.items():
                # Only what matters: a peer that is ahead sends what belongs to the next sum.
                poll.register(fd, select.POLLIN * bool(receives[peer]) | select.POLLOUT * bool(sends[peer]))
            for fd, _ in poll.poll():
                if fd == self._control.fileno():
                    raise InterruptedSumError
                if not self._move(by_fd[fd], sends, receives):
                    pending.discard(by_fd[fd])

    def _move(self, peer: int, sends: dict[int, memoryview], receives: dict[int, memoryview]) -> bool:
        """Move what can be moved; False when nothing is left to move."""
        connection = self._peers[peer]
        try:
            with suppress(BlockingIOError):
                while sends[peer]:
                    sends[peer] = sends[peer][connection.send(sends[peer]) :]
            with suppress(BlockingIOError):
                while receives[peer]:
                    count = connection.recv_into(receives[peer])
                    if not count:
                        raise PeerLostError(peer)
                    receives[peer] = receives[peer][count:]
        except OSError as error:
            raise PeerLostError(peer) from error
        return bool(sends[peer] or receives[peer])
