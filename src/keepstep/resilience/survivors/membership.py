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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.resilience.survivors.wire import Message

Send = Callable[[int, Message], None]
"""Sends a message to a replica; a replica that is gone does not matter."""
Note = Callable[..., None]
"""Called as note(kind, **facts) for each change of membership."""
REMEMBERED_STEPS = 50


@dataclass(frozen=True)
class Fewest:
    """What is enough to train, where nodes come and go."""

    nodes: int
    """With replicas of fewer nodes the run pauses."""
    replicas: int
    """The first step begins when so many are there."""
    slots: int
    """Numbers that belong to the replicas and spares of one node."""

    def met_by(self, numbers: Collection[int]) -> bool:
        """Whether these replicas may train."""
        return len({number // self.slots for number in numbers}) >= self.nodes


@dataclass
class _Replica:
    number: int
    addresses: Sequence[str]
    """Of its processes, by their rank in it."""
    phase: Literal["building", "waiting", "copying", "member"] = "building"
    checksum: str = ""
    step: int = -1
    """The step that it has prepared; of one that copies, the step of the state that it has."""
    snapshot: int = -1
    """The newest step in the memory of its agent."""
    is_noted: bool = False
    """Whether it waits and has been reported as a spare."""


class Membership:
    """The state of the protocol. Its methods are called for what arrives, and send what follows."""

    def __init__(self, expected: int, send: Send, note: Note, fewest: Fewest | None = None) -> None:
        """The first epoch begins when `expected` replicas are there, or the `fewest`; more than `expected` wait."""
        self._expected, self._send, self._note = expected, send, note
        self._fewest = fewest or Fewest(1, expected, 1)
        self._replicas: dict[int, _Replica] = {}
        self._gone: dict[int, _Replica] = {}
        """By number: the newest replica that is gone."""
        self._members: list[int] = []
        """The longest-serving first: it leads, because it knows most about the steps so far."""
        self._first: int | None = None
        """Makes or loads the state that the others copy; None as long as not enough of them are connected."""
        self._epoch = 0
        self._step = 0
        """Committed last."""
        self._history: list[list[int]] = []
        """The members when the step in flight began, and after each loss since then."""
        self._copy = 0
        """Counts the copies of the state: what belongs to an earlier one is out of date."""
        self._holds = False
        """Whether the members wait between two steps until others have their state."""
        self.paused_at: float | None = None
        """When the members began to wait between two steps, because there are too few of them; else None."""
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

    def hello(self, number: int, addresses: Sequence[str], snapshot: int = -1) -> None:
        """A replica has connected. When enough are there, the one with the newest snapshot starts the run."""
        self._replicas[number] = _Replica(number, addresses, snapshot=snapshot)
        if self.over or self.all_lost:
            self._send(number, {"kind": "over" if self.over else "evicted"})
            return
        welcome = [number]
        if self._first is None:
            if len(self._replicas) < self._fewest.replicas or not self._fewest.met_by(self._replicas):
                return
            self._first = max(self._replicas.values(), key=lambda each: each.snapshot).number
            welcome = list(self._replicas)
        for each in welcome:
            self._send(each, {"kind": "welcome", "leads": each == self.leader})

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
            case "asked_to_stop" if self.paused_at is not None:
                # All of them agree on that in a step.
                self.paused_at = None
                self._next_epoch()
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
            if replica.is_noted:
                self._note_spare("spare_lost", number, what=why)
            # Without the first replica there is no state yet that the others could copy.
            if not self._members and number == self._first:
                self._end()
            self._try_end_hold()
            return
        self._changes.append({"kind": "left", "replica": number, "what": why})
        self._leave(number)

    def _leave(self, number: int) -> None:
        self._members.remove(number)
        # They finish a step with those who are left, then wait again where these are too few.
        self._holds, self.paused_at = False, None
        # A source of the copy is gone: those who join start over after the next step.
        for each in self._in_phase("copying"):
            each.phase = "waiting"
        if self._members:
            self._next_epoch()
        else:
            self._end()

    def _end(self) -> None:
        """Nobody has a state that others could copy: when they have ended, the agent starts over."""
        self.all_lost = True
        for number in self._replicas:
            self._send(number, {"kind": "evicted"})

    def _ready(self, replica: _Replica) -> None:
        replica.phase = "waiting"
        waiting = [each.number for each in self._in_phase("waiting")]
        self._note_spares()
        suffice = self._fewest.met_by([*self._members, *waiting])
        if self._members:
            if suffice and self.paused_at is not None:
                self._hold()
            return
        if not suffice or len(waiting) < self._fewest.replicas or self._first not in waiting:
            return
        assert self._first is not None
        self._replicas[self._first].phase = "member"
        self._members = [self._first]
        self._hold()
        self._try_end_hold()

    def _hold(self) -> None:
        """Between two steps: the members give their state to those who wait, and train on when these have it."""
        self._epoch += 1
        self._holds, self.paused_at = True, None
        view = {**self._view(), **self._admit(), "entering": True}
        for number in self._members:
            self._send(number, view)

    def _admit(self) -> Message:
        """Who starts to copy the state of the members now; spares wait until there is a place."""
        if self._in_phase("copying"):
            return {"copy": self._copy, "joining": []}
        joining = self._in_phase("waiting")[: self._expected - len(self._members)]
        self._copy += bool(joining)
        for each in joining:
            each.phase, each.step, each.is_noted = "copying", -1, False
            self._send(each.number, {"kind": "copy", "copy": self._copy, "sources": len(self._members)})
        self._note_spares()
        return {"copy": self._copy, "joining": [[each.number, each.addresses] for each in joining]}

    def _enter(self) -> bool:
        """Those who copy become members; whether there are any."""
        entering = self._in_phase("copying")
        for each in entering:
            each.phase = "member"
            self._members.append(each.number)
            # Of the first epoch, those are reported that the run would not have waited for.
            if self._step or len(self._members) > self._fewest.replicas:
                self._changes.append({"kind": "joined", "replica": each.number})
        return bool(entering)

    def _try_end_hold(self) -> None:
        """The next step begins when nobody copies any more."""
        if self._holds and all(each.step >= 0 for each in self._in_phase("copying")):
            self._enter()
            self._holds = False
            if not self._step:
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
        members = [[number, self._replicas[number].addresses] for number in self._members]
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
        self._step = leader.step
        entering = all(each.step == leader.step - 1 for each in self._in_phase("copying")) and self._enter()
        pauses = not (entering or self._fewest.met_by(self._members))
        admitted = {"copy": self._copy, "joining": []} if entering or pauses else self._admit()
        facts = {"step": leader.step, **admitted, "entering": entering, "pauses": pauses}
        for each in members:
            self._send(each.number, {"kind": "commit", **facts})
        self._history = [] if entering else [list(self._members)]
        if pauses:
            self._pause()
        if entering:
            self._next_epoch()

    def _pause(self) -> None:
        """The members wait between two steps: for nodes that join, for a stop request, or for a loss among them."""
        self.paused_at = time.monotonic()
        self._note(kind="paused", step=self._step, ranks=len(self._members), min_nodes=self._fewest.nodes)
        if self._fewest.met_by([*self._members, *(each.number for each in self._in_phase("waiting"))]):
            self._hold()

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

    def _note_spares(self) -> None:
        """Report those who wait while all places are taken; they may have been ready before the last place was."""
        if len(self._members) + len(self._in_phase("copying")) < self._expected:
            return
        for each in self._in_phase("waiting"):
            if not each.is_noted:
                each.is_noted = True
                self._note_spare("spare_ready", each.number)

    def _note_spare(self, kind: str, number: int, **facts: str) -> None:
        self._note(kind=kind, replica=number, step=self._step, ranks=len(self._members), **facts)

    def _finished(self) -> None:
        self.over, self.paused_at = True, None
        for each in self._replicas.values():
            if each.phase != "member":
                self._send(each.number, {"kind": "over"})

    def _in_phase(self, phase: str) -> list[_Replica]:
        return [each for each in self._replicas.values() if each.phase == phase]


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
