"""Who takes part in a step, and whether it counts: the one authority that all replicas of a run obey.

A step has two phases. Every member *prepares*: it holds the summed gradients and reports their checksum. When all
members of the epoch have prepared, the step is *committed*, and each of them updates its weights. A loss before that
starts a new epoch, in which the survivors redo the step; a loss after that finds the survivors with a committed step.
So a step is applied by all living replicas or by none.

A replica without a connection to this authority cannot commit, so there are never two truths.

One that joins copies the state of the members while these train: they send it one state between two steps, and then
the sums of each step that is committed. When it has applied all steps but the one in flight, it becomes a member.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from keepstep.resilience.survivors.wire import Message

Send = Callable[[int, Message], None]
"""Sends a message to a replica; a replica that is gone does not matter."""
Note = Callable[..., None]
"""Called as note(kind, **facts) for each change of membership."""
REMEMBERED_STEPS = 50


@dataclass
class _Replica:
    number: int
    address: str
    phase: Literal["building", "waiting", "copying", "member"] = "building"
    checksum: str = ""
    step: int = -1
    """The step that it has prepared; of one that copies, the step of the state that it has."""


class Membership:
    """The state of the protocol. Its methods are called for what arrives, and send what follows."""

    def __init__(self, expected: int, send: Send, note: Note, first: int | None = None) -> None:
        """The first epoch begins when `expected` replicas are there; more than these wait as spares.

        `first` makes or loads the state that the others copy: the first one that connects, if it is None.
        """
        self._expected, self._send, self._note = expected, send, note
        self._replicas: dict[int, _Replica] = {}
        self._gone: dict[int, _Replica] = {}
        """By number: the newest replica that is gone."""
        self._members: list[int] = []
        """The longest-serving first: it leads, because it knows most about the steps so far."""
        self._first = first
        self.leader_of_last_step: int | None = None
        """The leader when a step was committed last."""
        self._epoch = 0
        self._step = 0
        """Committed last."""
        self._history: list[list[int]] = []
        """The members when the step in flight began, and after each loss since then."""
        self._copy = 0
        """Counts the copies of the state: what belongs to an earlier one is out of date."""
        self._holds = False
        """Whether the first replica waits until the others have its state."""
        self._joins_stalled_s = 0.0
        """What the steps took beyond the usual while others copied the state."""
        self._changes: list[Message] = []
        """Changes of membership since the last commit, which are noted with the time that they cost."""
        self._committed_at = time.monotonic()
        self._step_times_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.over = False
        """Whether a member has finished the run: nobody joins any more."""
        self.all_lost = False
        """Whether nobody is left who could continue."""

    @property
    def leader(self) -> int | None:
        """The replica that writes for all."""
        return self._members[0] if self._members else self._first

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas of this epoch."""
        return tuple(self._members)

    def is_spare(self, number: int) -> bool:
        """Whether a replica waits for a free place, or did so until it was gone."""
        replica = self._replicas.get(number) or self._gone.get(number)
        return replica is not None and replica.phase == "waiting"

    def hello(self, number: int, address: str) -> None:
        """A replica has connected; the first one makes or loads the state that the others copy."""
        if self._first is None:
            self._first = number
        self._replicas[number] = _Replica(number, address)
        self._send(number, {"kind": "over"} if self.over else {"kind": "welcome", "leads": number == self.leader})

    def receive(self, number: int, message: Message) -> None:
        """A message from a replica that is connected."""
        replica = self._replicas.get(number)
        if self.over and message["kind"] == "ready":
            # The run ended while it copied the state, perhaps with the very step that it was to enter after.
            self._send(number, {"kind": "over"})
        if replica is None or self.over:
            return
        match message["kind"]:
            case "ready" if replica.phase == "building":
                self._ready(replica)
            case "ready" if replica.phase == "copying" and message["copy"] == self._copy:
                # It failed to copy.
                replica.phase = "waiting"
                self._try_end_hold()
            case "ready" if replica.phase == "member" and message["copy"] == self._copy:
                # A member was lost before it had sent all to this one, which has done no step yet.
                replica.phase = "waiting"
                self._changes = [each for each in self._changes if each["replica"] != number]
                self._leave(number)
            case "copied" if replica.phase == "copying" and message["copy"] == self._copy:
                replica.step = message["step"]
                self._try_end_hold()
            case "prepared" if replica.phase == "member" and message["epoch"] == self._epoch:
                replica.checksum, replica.step = message["checksum"], message["step"]
                self._try_commit()
            case "broken" if message["epoch"] == self._epoch:
                self.lost(message["peer"], "no connection to another replica")
            case "finished":
                self._finished()

    def lost(self, number: int, why: str = "lost") -> None:
        """A replica is gone: its process ended, or it is not heard from and must not take part any more."""
        replica = self._replicas.pop(number, None)
        if replica is None or self.over:
            return
        self._send(number, {"kind": "evicted"})
        self._gone[number] = replica
        if replica.phase != "member":
            if replica.phase == "waiting" and self._is_full:
                self._note_spare("spare_lost", number, what=why)
            # Without the first replica there is no state yet that the others could copy.
            self.all_lost = self.all_lost or (not self._members and number == self._first)
            self._try_end_hold()
            return
        self._changes.append({"kind": "left", "replica": number, "what": why})
        self._leave(number)

    def _leave(self, number: int) -> None:
        self._members.remove(number)
        # A source of the copy is gone: those who join start over after the next step.
        for each in self._in_phase("copying"):
            each.phase = "waiting"
        if self._members:
            self._next_epoch()
        else:
            self.all_lost = True

    def _ready(self, replica: _Replica) -> None:
        replica.phase = "waiting"
        waiting = self._in_phase("waiting")
        if self._is_full:
            self._note_spare("spare_ready", replica.number)
        if self._members or len(waiting) < self._expected or self._first not in [each.number for each in waiting]:
            return
        assert self._first is not None
        self._replicas[self._first].phase = "member"
        self._members = [self._first]
        self._epoch += 1
        self._holds = True
        self._send(self._first, {**self._view(), **self._admit(), "entering": True})
        for each in self._in_phase("waiting"):
            self._note_spare("spare_ready", each.number)
        self._try_end_hold()

    def _admit(self) -> Message:
        """Who starts to copy the state of the members now; spares wait until there is a place."""
        if self._in_phase("copying"):
            return {"copy": self._copy, "joining": []}
        joining = self._in_phase("waiting")[: self._expected - len(self._members)]
        self._copy += bool(joining)
        for each in joining:
            each.phase, each.step = "copying", -1
            self._send(each.number, {"kind": "copy", "copy": self._copy, "sources": len(self._members)})
        return {"copy": self._copy, "joining": [[each.number, each.address] for each in joining]}

    def _enter(self) -> bool:
        """Those who copy become members; whether there are any."""
        entering = self._in_phase("copying")
        for each in entering:
            each.phase = "member"
            self._members.append(each.number)
            if not self._holds:
                self._changes.append({"kind": "joined", "replica": each.number})
        return bool(entering)

    def _try_end_hold(self) -> None:
        """At the start: the first step begins when nobody copies any more."""
        if self._holds and all(each.step >= 0 for each in self._in_phase("copying")):
            self._enter()
            self._holds = False
            self._committed_at = time.monotonic()
            self._history = []
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._history.append(list(self._members))
        for each in self._in_phase("member"):
            each.checksum = ""
        for number in self._members:
            self._send(number, self._view())

    def _view(self) -> Message:
        members = [[number, self._replicas[number].address] for number in self._members]
        return {"kind": "view", "epoch": self._epoch, "members": members, "history": self._history}

    def _try_commit(self) -> None:
        members = self._in_phase("member")
        if not all(each.checksum for each in members):
            return
        prepared = Counter((each.step, each.checksum) for each in members)
        leader = self._replicas[self._members[0]]
        right = (leader.step, leader.checksum)
        if len(prepared) > 1:
            # Bits that differ mean a broken machine. The majority is right; between equals the leader is.
            most = max(prepared.values())
            right = right if prepared[right] == most else next(key for key in prepared if prepared[key] == most)
            for number in [each.number for each in members if (each.step, each.checksum) != right]:
                self.lost(number, "its sums differ from those of the others")
            return
        for each in members:
            each.checksum = ""
        self._note_changes(leader.step)
        self.leader_of_last_step, self._step = leader.number, leader.step
        entering = all(each.step == leader.step - 1 for each in self._in_phase("copying")) and self._enter()
        admitted = {"copy": self._copy, "joining": []} if entering else self._admit()
        for each in members:
            self._send(each.number, {"kind": "commit", "step": leader.step, **admitted, "entering": entering})
        self._history = [] if entering else [list(self._members)]
        if entering:
            self._next_epoch()

    def _note_changes(self, step: int) -> None:
        """Report changes of membership with the step that they delayed."""
        now = time.monotonic()
        step_s, self._committed_at = now - self._committed_at, now
        copying = bool(self._in_phase("copying"))
        if not self._changes and not copying:
            self._step_times_s.append(step_s)
            return
        usual_s = statistics.median(self._step_times_s) if self._step_times_s else 0.0
        stall_s = max(0.0, step_s - usual_s) if usual_s else 0.0
        for change in self._changes:
            also_s = self._joins_stalled_s if change["kind"] == "joined" else 0.0
            facts = {"step": step, "ranks": len(self._members), "stall_s": stall_s + also_s, "usual_step_s": usual_s}
            self._note(**change, **facts)
        self._joins_stalled_s = self._joins_stalled_s + stall_s if copying and not self._changes else 0.0
        self._changes.clear()

    @property
    def _is_full(self) -> bool:
        """Whether all places are taken, so that whoever waits is a spare."""
        return len(self._members) + len(self._in_phase("copying")) >= self._expected

    def _note_spare(self, kind: str, number: int, **facts: str) -> None:
        self._note(kind=kind, replica=number, step=self._step, ranks=len(self._members), **facts)

    def _finished(self) -> None:
        self.over = True
        for each in self._replicas.values():
            if each.phase != "member":
                self._send(each.number, {"kind": "over"})

    def _in_phase(self, phase: str) -> list[_Replica]:
        return [each for each in self._replicas.values() if each.phase == phase]
