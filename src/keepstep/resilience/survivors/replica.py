"""A replica's side: it joins, sums with the other members, and applies a step only when it is committed."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from keepstep.core.errors import KeepstepError, StopRequested
from keepstep.core.failpoints import reach
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.exchange import Exchange, InterruptedSumError, PeerLostError
from keepstep.resilience.survivors.shared_numbers import Numbers, SharedNumbers, numbers_of
from keepstep.resilience.survivors.state_copy import Bytes, Receiver, Sender, part_bounds
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


class ReplicaState(Protocol):
    """What replicas hold in common, as a member gives it away and one that joins takes it over."""

    def part(self, part: int, parts: int) -> Bytes:
        """A copy of one of `parts` equal parts of all tensors."""

    def values(self) -> dict[str, Any]:
        """Plain values, after every step in flight has been read. Called on all members; one of them sends it."""

    def buffers(self) -> list[memoryview]:
        """Memory for all tensors."""

    def install(self) -> None:
        """Take over the tensors, which are complete."""

    def replay(self, facts: Mapping[str, Any], sums: Numbers) -> None:
        """Apply a step that the members have committed; `facts` and `sums` are those that they gave to `relay`."""


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
        self._view: Message = {"epoch": 0, "members": [[number, address]], "history": [[number]]}
        self.changed_numbers = False
        """Whether a sum that was interrupted has changed the numbers already."""
        self._exchange = Exchange(self._control, 0, {})
        self._shared: SharedNumbers | None = None
        self._admitted: Message = {"joining": [], "entering": False}
        self._senders: list[Sender] = []
        self._step = 0
        """Committed last."""
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

    def share(self, microbatches: int) -> list[int]:
        """Which of the micro batches of the step in flight this replica computes."""
        return deal(self._view["history"], microbatches)[self.number]

    def enter(self, step: int) -> None:
        """The first replica, with the state of `step`: wait for all others, which copy it at the next boundary."""
        self._step = step
        self._send({"kind": "ready", "copy": 0})
        self._take_view(self._next("view"))

    def copy_from_members(self, state: ReplicaState) -> dict[str, Any]:
        """Any other replica, when all else is ready: copy the state while the members train; returns its values.

        From here on this replica is a member, and the members wait for its share of the next step.
        """
        self._send({"kind": "ready", "copy": 0})
        while True:
            copy = self._next("copy")
            try:
                values = self._copy(state, copy["sources"], copy["copy"])
            except ConnectionError:
                # A member is gone, or sent bits that differ: the coordinator says when to try again.
                self._send({"kind": "ready", "copy": copy["copy"]})
                continue
            self._take_view(self._next("view"))
            self._form_exchange()
            return values

    def _copy(self, state: ReplicaState, sources: int, copy: int) -> dict[str, Any]:
        receiver = Receiver(self._listener, self._control, self._copy_is_over, sources, copy)
        sums = np.empty(0, np.int64)

        def room(count: int) -> Numbers:
            nonlocal sums
            sums = sums if len(sums) == count else np.empty(count, np.int64)
            return sums

        try:
            receiver.receive_state(state.buffers())
            state.install()
            while True:
                self._send({"kind": "copied", "copy": copy, "step": receiver.step})
                message = receiver.next_sum(room)
                if message["kind"] == "end":
                    self._step = receiver.step
                    return dict(message["values"])
                state.replay(message["facts"], sums)
                reach("replayed")
        finally:
            receiver.close()

    def _copy_is_over(self, readable: bool) -> bool:
        """Whether the coordinator has sent anything but the membership that this replica enters."""
        if readable:
            self._read()
        return any(message["kind"] != "view" for message in self._messages)

    def at_boundary(self, state: ReplicaState) -> bool:
        """Between two steps: let others copy the state and enter; whether the membership is another one now."""
        before, admitted = self._view["epoch"], self._admitted
        self._admitted = {"joining": [], "entering": False}
        if admitted["joining"]:
            part = state.part(self.rank, self.ranks)
            header = {"kind": "state", "copy": admitted["copy"], "part": self.rank, "step": self._step}
            self._senders = [Sender(address, header, part) for _, address in admitted["joining"]]
        if admitted["entering"]:
            values = state.values()
            for sender in self._senders:
                sender.send({"kind": "end", "step": self._step, "values": values if self.rank == 0 else {}})
            self._senders = []
            reach("entering")
            self._take_view(self._next("view"))
        if self._view["epoch"] != before:
            self._form_exchange()
        return bool(self._view["epoch"] != before)

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
            self._send({"kind": "finished"})

    def close(self) -> None:
        """Leave."""
        self._exchange.close()
        self._listener.close()
        self._control.close()
        if self._shared is not None:
            self._shared.close()

    # ---------------------------------------------------------------- a step

    def shared_numbers(self, count: int) -> Numbers:
        """Memory for the sums of a step, before this replica is a member. `sum_` is fastest with exactly this array."""
        address: str = self._view["members"][0][1]
        if not address.startswith("/"):
            # Replicas of other nodes do not read it.
            return np.zeros(count, np.int64)
        self._shared = SharedNumbers(address, count)
        return self._shared.numbers

    def sum_(self, numbers: Numbers) -> None:
        """Replace whole numbers by their sum over the members; MembershipChangedError if these change meanwhile."""
        self.changed_numbers = False
        self.raise_if_changed()
        try:
            self._exchange.sum_(numbers)
        except (InterruptedSumError, PeerLostError) as error:
            self.changed_numbers = self._exchange.changed_numbers
            self._await_change(error.peer if isinstance(error, PeerLostError) else None)

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
        self._step, self._admitted = step, message
        self._view["history"] = [[number for number, _ in self._view["members"]]]

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
        for sender in self._senders:
            # A member is gone, and its part of the state with it.
            sender.abandon()
        self._senders = []
        self._view, self._admitted = view, {"joining": [], "entering": False, **view}
        self.leads = self.rank == 0

    def _form_exchange(self) -> None:
        """Connect to every other member; another loss meanwhile means to start over with those who are left."""
        while True:
            self._exchange.close()
            peers: dict[int, socket.socket] = {}
            try:
                self._connect(peers)
                self._exchange = Exchange(self._control, self.rank, peers, self._numbers_of_all())
                reach("exchange_formed")
                return
            except MembershipChangedError:
                for connection in peers.values():
                    connection.close()

    def _numbers_of_all(self) -> dict[int, Numbers]:
        """By rank; none where this replica shares none."""
        if self._shared is None:
            return {}
        found = {self.rank: self._shared.numbers}
        for rank, (number, address) in enumerate(self._view["members"]):
            if number != self.number:
                try:
                    found[rank] = numbers_of(address)
                except OSError:
                    self._await_change(lost=rank)
        return found

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


def deal(history: Sequence[Sequence[int]], microbatches: int) -> dict[int, list[int]]:
    """Who computes which micro batches of a step, by the members at its start and after each loss since then.

    Everybody keeps what was theirs, so that nothing is computed twice, and gets an equal part of what is left.
    """
    first = history[0]
    shares = {number: list(range(rank, microbatches, len(first))) for rank, number in enumerate(first)}
    for members in history[1:]:
        orphans = sorted(each for number, share in shares.items() if number not in members for each in share)
        shares = {number: shares[number] for number in members}
        for orphan in orphans:
            min(shares.values(), key=len).append(orphan)
    return shares
