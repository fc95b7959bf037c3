"""A replica's side: it joins, sums with the other members, and applies a step only when it is committed."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import KeepstepError, StopRequested
from keepstep.core.failpoints import reach
from keepstep.resilience.survivors import state_copy, wire
from keepstep.resilience.survivors.exchange import Exchange, InterruptedSumError, Numbers, PeerLostError
from keepstep.resilience.survivors.wire import Message

POLL_S = 0.5
"""Between two looks at the stop flag while a replica waits to join."""


class MembershipChangedError(Exception):
    """Another epoch begins: the step in flight is redone by its members."""


class CoordinatorLostError(Exception):
    """The agent is gone: no step can be committed any more."""


class EvictedError(ConnectionError):
    """The others continue without this replica; its agent starts another one."""


class RunOverError(KeepstepError):
    """The run ended before this replica had joined the others: there is nothing left to do."""

    exit_code = 0


@dataclass(frozen=True)
class Joining:
    """A replica that waits for the state of the members."""

    number: int
    address: str


class Replica:
    """This process among the replicas of its run."""

    waiting: Callable[[], None] = staticmethod(lambda: None)
    """Called again and again while this replica waits for its place among the members."""

    def __init__(self, coordinator: Path | str, number: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Connect to the coordinator. `stopped` says whether this process was asked to stop."""
        self.number, self._stopped, self._coordinator = number, stopped, str(coordinator)
        self._control = wire.connect(self._coordinator)
        self._inbox, self._messages = wire.Inbox(), list[Message]()
        self._listener, address = wire.listen_for_peers(self._coordinator, number, self._control)
        self._view: Message = {"epoch": 0, "members": [[number, address]]}
        self._exchange = Exchange(self._control, 0, {})
        self._joining: list[Joining] = []
        self._send({"kind": "hello", "number": number, "address": address})
        self.leads = bool(self._next("welcome")["leads"])
        """Whether this replica writes for all: the one that has been a member for longest."""

    # ---------------------------------------------------------------- membership

    @property
    def ranks(self) -> int:
        """Members of this epoch."""
        return len(self._view["members"])

    @property
    def rank(self) -> int:
        """This replica's place among them; 0 leads."""
        return [number for number, _ in self._view["members"]].index(self.number)

    def enter(self) -> None:
        """The first replica, with a state: wait for all others, which copy it at the next boundary."""
        self._send({"kind": "ready", "epoch": 0})
        self._take_view(self._next("view"))

    def copy_from_members(self, buffers: Sequence[memoryview]) -> dict[str, Any]:
        """Any other replica, when all else is ready: fill `buffers` with the members' state; returns its values.

        From here on this replica is a member, and the members wait for its share of the next step.
        """
        self._send({"kind": "ready", "epoch": 0})
        while True:
            copy = self._next("copy")
            try:
                values = state_copy.receive(self._listener, self._control, copy["sources"], copy["epoch"], buffers)
            except ConnectionError:
                # A source is gone, or sent bits that differ: the coordinator tells when to try again.
                self._send({"kind": "ready", "epoch": copy["epoch"]})
                continue
            reach("copied")
            self._send({"kind": "copied", "epoch": copy["epoch"]})
            message = self._next("view", "retry")
            if message["kind"] == "view":
                self._take_view(message)
                self._form_exchange()
                return values

    def at_boundary(self, serve: Callable[[list[Joining], int, int, int], None]) -> bool:
        """Between two steps: let others join, take over changes; whether the membership is another one now.

        `serve` is called with those who join, this replica's part, the number of parts, and the epoch.
        """
        before = self._view["epoch"]
        while self._joining:
            serve(self._joining, self.rank, self.ranks, self._view["epoch"])
            self._joining = []
            self._take_view(self._next("view"))
        if self._view["epoch"] != before:
            self._form_exchange()
        return bool(self._view["epoch"] != before)

    def rejoin(self) -> None:
        """After a MembershipChangedError: connect to the members of the new epoch."""
        self._form_exchange()

    def finish(self) -> None:
        """This replica has done its last step."""
        with suppress(CoordinatorLostError, EvictedError):
            self._send({"kind": "finished"})

    def close(self) -> None:
        """Leave."""
        self._exchange.close()
        self._listener.close()
        self._control.close()

    # ---------------------------------------------------------------- a step

    def sum_(self, numbers: Numbers) -> None:
        """Replace whole numbers by their sum over the members; MembershipChangedError if these change meanwhile."""
        self.raise_if_changed()
        try:
            self._exchange.sum_(numbers)
        except InterruptedSumError:
            self._await_change()
        except PeerLostError as error:
            self._await_change(lost=error.peer)

    def commit(self, step: int, checksum: str) -> None:
        """Return when every member holds the sums of this step, so that all of them will apply it."""
        reach("summed")
        self._send({"kind": "prepared", "epoch": self._view["epoch"], "step": step, "checksum": checksum})
        reach("prepared")
        message = self._next("commit", "view")
        if message["kind"] == "view":
            self._take_view(message)
            raise MembershipChangedError
        reach("committed")
        self._joining = [Joining(*each) for each in message["joining"]]

    def raise_if_changed(self) -> None:
        """Raise MembershipChangedError if a new epoch has started: no need to finish the work for the old one."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            if self._messages or selector.select(0):
                self._await_change()

    def _await_change(self, lost: int | None = None) -> None:
        if lost is not None:
            self._report_lost(lost)
        self._take_view(self._next("view"))
        raise MembershipChangedError

    # ---------------------------------------------------------------- connections

    def _report_lost(self, rank: int) -> None:
        self._send({"kind": "broken", "epoch": self._view["epoch"], "peer": self._view["members"][rank][0]})

    def _take_view(self, view: Message) -> None:
        reach("view_received")
        self._view, self._joining = view, [Joining(*each) for each in view["joining"]]
        self.leads = self.rank == 0

    def _form_exchange(self) -> None:
        """Connect to every other member; another loss meanwhile means to start over with those who are left."""
        while True:
            self._exchange.close()
            peers: dict[int, socket.socket] = {}
            try:
                self._connect(peers)
                self._exchange = Exchange(self._control, self.rank, peers)
                reach("exchange_formed")
                return
            except MembershipChangedError:
                for connection in peers.values():
                    connection.close()

    def _connect(self, peers: dict[int, socket.socket]) -> None:
        """Call those who have been members for longer, and wait for the calls of the others."""
        hello = {"kind": "member", "epoch": self._view["epoch"], "rank": self.rank}
        for rank, (_, address) in enumerate(self._view["members"][: self.rank]):
            try:
                peers[rank] = wire.connect(address)
                wire.send(peers[rank], hello)
            except OSError:
                self._await_change(lost=rank)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while len(peers) < self.ranks - 1:
                self.raise_if_changed()
                ready = [key.fileobj for key, _ in selector.select()]
                if self._control in ready:
                    continue
                caller, _ = self._listener.accept()
                with suppress(ConnectionError):
                    message = wire.receive(caller)
                    if message["kind"] == "member" and message["epoch"] == self._view["epoch"]:
                        peers[message["rank"]] = caller
                        continue
                caller.close()

    def _send(self, message: Message) -> None:
        try:
            wire.send(self._control, message)
        except OSError as error:
            raise self._coordinator_lost() from error

    def _coordinator_lost(self) -> Exception:
        """On another node the others may continue without this one, which has nothing that it may save."""
        if wire.is_network(self._coordinator):
            return EvictedError("no connection to the node that coordinates the replicas")
        return CoordinatorLostError()

    def _next(self, *kinds: str) -> Message:
        """Wait for a message of one of these kinds; others are of an epoch that is over."""
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if message["kind"] in kinds:
                    return message
                self._raise_if_out(message["kind"])
            with selectors.DefaultSelector() as selector:
                selector.register(self._control, selectors.EVENT_READ)
                if selector.select(POLL_S):
                    self._read()
                elif "copy" in kinds:
                    self.waiting()
                    if self._stopped():
                        raise StopRequested("stopped on request before this replica had joined the others")

    def _read(self) -> None:
        try:
            self._messages += self._inbox.read(self._control)
        except OSError as error:
            raise self._coordinator_lost() from error

    @staticmethod
    def _raise_if_out(kind: str) -> None:
        if kind == "over":
            raise RunOverError("the run ended before this replica had joined the others")
        if kind == "evicted":
            raise EvictedError("the other replicas continue without this one")
