"""A replica's side: it joins, sums with the other members, and applies a step only when it is committed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from keepstep.core.errors import StopRequested
from keepstep.core.failpoints import reach
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.control import Control, CoordinatorLostError, EvictedError
from keepstep.resilience.survivors.exchange import Exchange, InterruptedSumError, PeerLostError
from keepstep.resilience.survivors.membership import deal
from keepstep.resilience.survivors.peers import Peers
from keepstep.resilience.survivors.shared_numbers import Numbers, SharedNumbers, numbers_of
from keepstep.resilience.survivors.siblings import Siblings
from keepstep.resilience.survivors.state_copy import Receiver, ReplicaState, Sender, part_bounds
from keepstep.resilience.survivors.wire import Message

if TYPE_CHECKING:
    from torch import Tensor

    from keepstep.resilience.survivors.device_exchange import MakeGroup

Received = TypeVar("Received")
_NOBODY: Message = {"joining": [], "entering": False, "pauses": False}
"""A boundary between two steps at which nothing happens."""


class MembershipChangedError(Exception):
    """Another epoch begins: the step in flight is redone by its members."""


class Replica:
    """This process among the replicas of its run."""

    waiting: Callable[[], None] = staticmethod(lambda: None)
    """Called again and again while this replica waits for its place among the members, or for more nodes."""
    make_group: MakeGroup | None = None
    """What sums tensors on their device; without it sums are those of numbers in host memory."""

    def __init__(
        self,
        coordinator: Path | str,
        number: int,
        stopped: Callable[[], bool] = lambda: False,
        snapshot: int = -1,
        siblings: Siblings = Siblings(),  # noqa: B008 - frozen
    ) -> None:
        """Connect to the coordinator. `stopped` says whether this process was asked to stop.

        `snapshot` is the newest step that it could load from memory: the run starts with the newest of all. `siblings`
        are the processes of this replica. What it does before it joins others, each does by itself; from then on they
        do it together.
        """
        self.number, self.siblings = number, siblings
        self._stopped, self._coordinator = stopped, str(coordinator)
        self._control = Control(self._coordinator)
        name = f"{number}-{siblings.rank}"
        self._peers = Peers(self._coordinator, name, self._control.socket)
        self._view: Message = {"epoch": 0, "members": [[number, []]], "history": [[number]]}
        self.changed_numbers = False
        """Whether a sum that was interrupted has changed the numbers already."""
        self._exchange = Exchange(self._control.socket, 0, {})
        self._shared: SharedNumbers | None = None
        self._admitted: Message = _NOBODY
        self._senders: list[Sender] = []
        self._step = 0
        """Committed last."""
        hello = {"number": number, "rank": siblings.rank, "size": siblings.size, "name": siblings.name}
        self._control.send({"kind": "hello", "address": self._peers.address, "snapshot": snapshot, **hello})
        try:
            self.leads = bool(self._control.next("welcome", idle=self._wait_to_join)["leads"])
        except BaseException:
            self.close()
            raise
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

    def share(self, microbatches: int) -> list[int]:
        """Which of the micro batches of the step in flight this process computes. Its siblings have the next ones."""
        siblings = self.siblings
        places = deal(self._view["history"], microbatches // siblings.size)[self.number]
        return [siblings.size * place + siblings.rank for place in places]

    def enter(self, step: int) -> None:
        """The first replica, with the state of `step`: wait for all others, which copy it at the next boundary."""
        self._step = step
        self._control.send({"kind": "ready", "copy": 0})
        self._take_view(self._control.next("view"))

    def copy_from_members(self, state: ReplicaState) -> dict[str, Any]:
        """Any other replica, when all else is ready: copy the state while the members train; returns its values.

        From here on this replica is a member, and the members wait for its share of the next step.
        """
        self._control.send({"kind": "ready", "copy": 0})
        message = self._control.next("copy", idle=self._wait_to_join)
        while message["kind"] == "copy":
            try:
                values = self._copy(state, message["sources"], message["copy"])
            except ConnectionError:
                # A member is gone, or sent bits that differ: the coordinator says when to try again.
                self._control.send({"kind": "ready", "copy": message["copy"]})
                message = self._control.next("copy", idle=self._wait_to_join)
            else:
                # Another copy follows where a member was lost while they waited between two steps.
                message = self._control.next("view", "copy")
        self._take_view(message)
        self._form_exchange()
        return values

    def _copy(self, state: ReplicaState, sources: int, copy: int) -> dict[str, Any]:
        receiver = self._all_or_none(lambda: self._receive_state(state, sources, copy))
        sums = np.empty(0, np.int64)

        def room(count: int) -> Numbers:
            nonlocal sums
            sums = sums if len(sums) == count else np.empty(count, np.int64)
            return sums

        try:
            state.install()
            while True:
                self._control.send({"kind": "copied", "copy": copy, "step": receiver.step})
                message = self._all_or_none(lambda: receiver.next_sum(room))
                if message["kind"] == "end":
                    self._step = receiver.step
                    return dict(message["values"])
                state.replay(message["facts"], sums)
                reach("replayed")
        finally:
            receiver.close()

    def _receive_state(self, state: ReplicaState, sources: int, copy: int) -> Receiver:
        receiver = Receiver(self._peers.listener, self._control.socket, self._copy_is_over, sources, copy)
        try:
            receiver.receive_state(state.buffers())
        except BaseException:
            receiver.close()
            raise
        return receiver

    def _all_or_none(self, receive: Callable[[], Received]) -> Received:
        """What this process receives; ConnectionError if it, or another process of this replica, fails to."""
        try:
            received = receive()
        except ConnectionError:
            self.siblings.any(True)
            raise
        if self.siblings.any(False):
            raise ConnectionError("another process of this replica starts over")
        return received

    def _copy_is_over(self, readable: bool) -> bool:
        """Whether the coordinator has sent anything but the membership that this replica enters."""
        if readable:
            self._control.read()
        return bool(self._control.kinds() - {"view"})

    def at_boundary(self, state: ReplicaState) -> bool:
        """Between two steps: let others copy the state and enter; whether the membership is another one now.

        Where there are too few nodes, this waits for more.
        """
        before = self._view["epoch"]
        while self._admitted is not _NOBODY:
            admitted, self._admitted = self._admitted, _NOBODY
            self._serve(state, admitted)
            if admitted["entering"]:
                reach("entering")
                self._take_view(self._control.next("view"))
            elif admitted["pauses"]:
                self._take_view(self._control.next("view", idle=self._wait_for_nodes))
        if self._view["epoch"] != before:
            self._form_exchange()
        return bool(self._view["epoch"] != before)

    def _serve(self, state: ReplicaState, admitted: Message) -> None:
        if admitted["joining"]:
            part = state.part(self.rank, self.ranks)
            header = {"kind": "state", "copy": admitted["copy"], "part": self.rank, "step": self._step}
            self._senders = [Sender(each[self.siblings.rank], header, part) for _, each in admitted["joining"]]
        if admitted["entering"]:
            values = state.values()
            for sender in self._senders:
                sender.send({"kind": "end", "step": self._step, "values": values if self.rank == 0 else {}})
            self._senders = []

    def _wait_to_join(self) -> None:
        self.waiting()
        if self._stopped():
            raise StopRequested("stopped on request before this replica had joined the others")

    def _wait_for_nodes(self) -> None:
        self.waiting()
        if self._stopped():
            self._control.send({"kind": "asked_to_stop"})

    def relay(self, facts: Callable[[], Mapping[str, Any]], sums: Callable[[], Numbers]) -> None:
        """After `commit`: pass the sums of the step on to those who copy the state."""
        if not self._senders:
            return
        numbers = sums()
        start, end = part_bounds(len(numbers), self.rank, self.ranks)
        part = numbers[start:end].copy().view(np.uint8)
        message = {"kind": "sum", "step": self._step, "count": len(numbers), "facts": dict(facts())}
        for sender in self._senders:
            sender.send(message, part)

    def rejoin(self) -> None:
        """After a MembershipChangedError: connect to the members of the new epoch."""
        self._form_exchange()

    def finish(self) -> None:
        """This replica has done its last step."""
        with suppress(CoordinatorLostError, EvictedError):
            self._control.send({"kind": "finished"})

    def close(self) -> None:
        """Leave."""
        self._exchange.close()
        self._peers.close()
        self._control.socket.close()
        if self._shared is not None:
            self._shared.close()

    # ---------------------------------------------------------------- a step

    def shared_numbers(self, count: int) -> Numbers:
        """Memory for the sums of a step, before this replica is a member. `sum_` is fastest with exactly this array."""
        if wire.is_network(self._peers.address):
            # Replicas of other nodes do not read it.
            return np.zeros(count, np.int64)
        self._shared = SharedNumbers(self._peers.address, count)
        return self._shared.numbers

    def total(self, own: int) -> int:
        """The sum of a whole number over all processes of the members; MembershipChangedError if these change."""
        numbers = np.array([own])
        self._together(lambda: self.sum_(numbers))
        return self.siblings.sum(int(numbers[0]))

    def sum_(self, numbers: Numbers | Tensor) -> None:
        """Replace whole numbers by their sum over the members; MembershipChangedError if these change meanwhile.

        That may happen to one process of the replica alone; `commit` then raises it for the others.
        """
        self.changed_numbers = False
        self._raise_if_changed()
        try:
            self._exchange.sum_(numbers)
        except (InterruptedSumError, PeerLostError) as error:
            self.changed_numbers = self._exchange.changed_numbers
            self._await_change(error.peer if isinstance(error, PeerLostError) else None)

    def commit(self, step: int, checksum: str) -> None:
        """Return when every member holds the sums of this step, so that all of them will apply it."""
        reach("summed")
        self._control.send({"kind": "prepared", "epoch": self._view["epoch"], "step": step, "checksum": checksum})
        reach("prepared")
        message = self._control.next("commit", "view")
        if message["kind"] == "view":
            self._take_view(message)
            raise MembershipChangedError
        reach("committed")
        self._step, self._admitted = step, message
        self._view["history"] = [[number for number, _ in self._view["members"]]]

    def raise_if_changed(self) -> None:
        """Raise MembershipChangedError if a new epoch has started: no need to finish the work for the old one."""
        self._together(self._raise_if_changed)

    def _together(self, action: Callable[[], None]) -> None:
        """Do this on all processes of the replica. What one of them hears from the coordinator meanwhile stops all."""
        noticed = 0
        try:
            action()
        except MembershipChangedError:
            noticed = 1
        except CoordinatorLostError:
            noticed = 2
        by_any = self.siblings.largest(noticed)
        if by_any == 2:
            raise CoordinatorLostError
        if by_any and not noticed:
            self._take_view(self._control.next("view"))
        if by_any:
            raise MembershipChangedError

    def _raise_if_changed(self) -> None:
        if self._control.has_news:
            self._await_change()

    def _await_change(self, lost: int | None = None) -> None:
        if lost is not None:
            peer = self._view["members"][lost][0]
            self._control.send({"kind": "broken", "epoch": self._view["epoch"], "peer": peer})
        self._take_view(self._control.next("view"))
        raise MembershipChangedError

    # ---------------------------------------------------------------- connections

    def _take_view(self, view: Message) -> None:
        reach("view_received")
        for sender in self._senders:
            # A member is gone, and its part of the state with it.
            sender.abandon()
        self._senders = []
        self._view, self._admitted = view, {**_NOBODY, **view}
        self.leads = self.rank == 0

    def _form_exchange(self) -> None:
        """Connect to every other member, until all processes of this replica know of the same members."""
        self._together(self._form_own_exchange)
        while self.siblings.any((newest := self.siblings.largest(self._view["epoch"])) > self._view["epoch"]):
            self._together(partial(self._catch_up, newest))

    def _catch_up(self, epoch: int) -> None:
        if self._view["epoch"] < epoch:
            self._take_view(self._control.next("view"))
            self._form_own_exchange()

    def _form_own_exchange(self) -> None:
        """Connect to every other member; another loss meanwhile means to start over with those who are left."""
        while True:
            self._exchange.close()
            peers: dict[int, socket.socket] = {}
            try:
                peers = self._connect()
                self._exchange = self._new_exchange(peers)
                reach("exchange_formed")
                return
            except MembershipChangedError:
                for connection in peers.values():
                    connection.close()

    def _new_exchange(self, peers: dict[int, socket.socket]) -> Exchange:
        if self.make_group is None:
            return Exchange(self._control.socket, self.rank, peers, self._numbers_of_all())
        from keepstep.resilience.survivors.device_exchange import DeviceExchange

        try:
            return DeviceExchange(self._control.socket, self.rank, peers, self.make_group)
        except OSError:
            # Whoever is gone, or has heard of the next epoch first: this one has no store without the first member.
            self._await_change(lost=0 if self.rank else None)
            raise

    def _numbers_of_all(self) -> dict[int, Numbers]:
        """By rank; none where this replica shares none."""
        if self._shared is None:
            return {}
        found = {self.rank: self._shared.numbers}
        for rank, (number, addresses) in enumerate(self._view["members"]):
            if number != self.number:
                try:
                    found[rank] = numbers_of(addresses[self.siblings.rank])
                except OSError:
                    self._await_change(lost=rank)
        return found

    def _connect(self) -> dict[int, socket.socket]:
        addresses = [addresses[self.siblings.rank] for _, addresses in self._view["members"]]
        try:
            return self._peers.connect(self._view["epoch"], self.rank, addresses, self._raise_if_changed)
        except PeerLostError as error:
            self._await_change(error.peer)
            raise
