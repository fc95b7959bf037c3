"""Who takes part in a step, and whether it counts: the one authority that all replicas of a run obey.

A step has two phases. Every member *prepares*: it holds the summed gradients and reports their checksum. When all
members of the epoch have prepared, the step is *committed*, and each of them updates its weights. A loss before that
starts a new epoch, in which the survivors redo the step; a loss after that finds the survivors with a committed step.
So a step is applied by all living replicas or by none.

A replica without a connection to this authority cannot commit, so there are never two truths.
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
    phase: Literal["building", "waiting", "copying", "copied", "member"] = "building"
    checksum: str = ""
    step: int = -1


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
        self._admitting = False
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
        if replica is None or self.over:
            return
        match message["kind"]:
            case "ready" if replica.phase == "building" or message["epoch"] == self._epoch:
                self._ready(replica)
            case "copied" if replica.phase == "copying" and message["epoch"] == self._epoch:
                replica.phase = "copied"
                self._try_next_epoch()
            case "prepared" if replica.phase == "member" and message["epoch"] == self._epoch:
                replica.checksum, replica.step = message["checksum"], message["step"]
                self._try_commit()
            case "broken" if message["epoch"] == self._epoch and not self._admitting:
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
            if replica.phase == "waiting" and self._members:
                self._note_spare("spare_lost", number, what=why)
            # Without the first replica there is no state yet that the others could copy.
            self.all_lost = self.all_lost or (not self._members and number == self._first)
            self._try_next_epoch()
            return
        self._members.remove(number)
        self._changes.append({"kind": "left", "replica": number, "what": why})
        if not self._members:
            self.all_lost = True
        elif self._admitting:
            # A source may be gone in the middle of a copy: those who join try again at the next step.
            for each in self._in_phase("copying") + self._in_phase("copied"):
                each.phase = "waiting"
                self._send(each.number, {"kind": "retry"})
            self._try_next_epoch()
        else:
            self._next_epoch()

    def _ready(self, replica: _Replica) -> None:
        replica.phase = "waiting"
        # It may have failed to copy: the members wait for the end of that.
        self._try_next_epoch()
        waiting = self._in_phase("waiting")
        if self._members and len(self._members) >= self._expected:
            self._note_spare("spare_ready", replica.number)
        if self._members or len(waiting) < self._expected or self._first not in [each.number for each in waiting]:
            return
        assert self._first is not None
        self._replicas[self._first].phase = "member"
        self._members = [self._first]
        self._epoch += 1
        self._send(self._first, {**self._view(), "joining": self._admit()})
        for each in self._in_phase("waiting"):
            self._note_spare("spare_ready", each.number)
        self._try_next_epoch()

    def _admit(self) -> list[list[int | str]]:
        """Whom the members serve now; those get a message too. Spares wait until there is a place."""
        joining = self._in_phase("waiting")[: self._expected - len(self._members)]
        self._admitting = bool(joining)
        for each in joining:
            each.phase = "copying"
            self._send(each.number, {"kind": "copy", "epoch": self._epoch, "sources": len(self._members)})
        return [[each.number, each.address] for each in joining]

    def _try_next_epoch(self) -> None:
        """After an admission: nobody copies any more, so the next epoch can begin."""
        if not self._admitting or self._in_phase("copying"):
            return
        for each in self._in_phase("copied"):
            each.phase = "member"
            self._members.append(each.number)
            if self._epoch > 1:
                self._changes.append({"kind": "joined", "replica": each.number})
        self._admitting = False
        self._next_epoch()

    def _next_epoch(self) -> None:
        self._epoch += 1
        for each in self._in_phase("member"):
            each.checksum = ""
        for number in self._members:
            self._send(number, {**self._view(), "joining": []})

    def _view(self) -> Message:
        members = [[number, self._replicas[number].address] for number in self._members]
        return {"kind": "view", "epoch": self._epoch, "members": members}

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
        commit = {"kind": "commit", "epoch": self._epoch, "step": leader.step, "joining": self._admit()}
        for each in members:
            self._send(each.number, commit)

    def _note_changes(self, step: int) -> None:
        """Report changes of membership with the step that they delayed."""
        now = time.monotonic()
        step_s, self._committed_at = now - self._committed_at, now
        if not self._changes:
            self._step_times_s.append(step_s)
            return
        usual_s = statistics.median(self._step_times_s) if self._step_times_s else 0.0
        stall_s = max(0.0, step_s - usual_s) if usual_s else 0.0
        for change in self._changes:
            facts = {"step": step, "ranks": len(self._members), "stall_s": stall_s, "usual_step_s": usual_s}
            self._note(**change, **facts)
        self._changes.clear()

    def _note_spare(self, kind: str, number: int, **facts: str) -> None:
        self._note(kind=kind, replica=number, step=self._step, ranks=len(self._members), **facts)

    def _finished(self) -> None:
        self.over = True
        for each in self._replicas.values():
            if each.phase != "member":
                self._send(each.number, {"kind": "over"})

    def _in_phase(self, phase: str) -> list[_Replica]:
        return [each for each in self._replicas.values() if each.phase == phase]
