"""The lease: one training at a time in a folder, however many machines share it. No torch.

A lease is a numbered file, and the highest number holds the folder. To take over is to create the next number, which
the storage grants to exactly one process (a hard link, an exclusive create, a conditional put; no lock of the file
system). Nobody writes to a file of another number, so a holder that was paused and wakes up cannot overwrite its
successor: it finds the higher number and leaves. The number is the fencing number of every commit.

The holder overwrites its file as a heartbeat. Others compare it with what they read before, on their own monotonic
clock: no clock is ever compared with that of another machine, and none can jump.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from keepstep.checkpoint.storage.store import Store, open_store
from keepstep.core import proc
from keepstep.core.errors import CheckpointError, RunTakenError, StopRequested, StorageError, malformed_as

FOLDER = "lease"
HEARTBEATS = 6
"""Heartbeats in the time after which a lease expires."""
WAIT_LEASES = 2
"""A live holder may be about to end, with a last save: how long to wait for it, in times of its expiry."""
RECORD_BYTES = 1024
FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_S = 0.2
_NOTICE_S = 10.0
_HINT = "stop the other run first, or give this run another name="


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, as its file describes it."""

    token: str
    host: str
    pid: int
    start_ticks: int
    boot: str
    """The boot and the container in which `pid` and `start_ticks` name one process."""
    launch: str
    """Identifies the launcher of the run."""
    lease_s: float
    """Without a heartbeat for this long, others may take over."""
    state: str = "held"
    heartbeat: int = 0

    def encode(self) -> bytes:
        """As JSON. Every field that changes has a fixed width, so that a reader never sees half of a change."""
        body = {**asdict(self), "state": f"{self.state:8}", "heartbeat": f"{self.heartbeat:012}"}
        return (json.dumps(body, indent=1) + "\n").encode().ljust(RECORD_BYTES)

    @property
    def has_ended(self) -> bool:
        """Whether it left, or is known to be dead."""
        if self.state == "released":
            return True
        return self.boot == proc.boot_identity() and proc.has_ended(self.pid, self.start_ticks)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process(launch: str, lease_s: float) -> Holder:
    """This process as a holder."""
    own = proc.status(os.getpid())
    ticks = own.start_ticks if own is not None else 0
    host = socket.gethostname()[:64]
    return Holder(secrets.token_hex(8), host, os.getpid(), ticks, proc.boot_identity(), launch[:128], lease_s)


def decode(content: bytes) -> Holder | None:
    """The holder in a lease's file; None where it is empty or damaged: then only its age counts."""
    with suppress(CheckpointError), malformed_as(CheckpointError, "lease"):
        raw: dict[str, Any] = json.loads(content)
        numbers = {name: int(raw[name]) for name in ("pid", "start_ticks", "heartbeat")}
        holder = Holder(**{**raw, **numbers, "lease_s": float(raw["lease_s"]), "state": str(raw["state"]).strip()})
        if 0 < holder.lease_s <= 86400 and 0 < holder.pid < 2**31:
            return holder
    return None


def newest(store: Store) -> tuple[int, bytes]:
    """The highest number and what its file says; 0 when nobody has held the folder yet."""
    number = max((int(name) for name in store.names(FOLDER) if re.fullmatch("[0-9]{10}", name)), default=0)
    try:
        return number, store.read(_file(number)) if number else b""
    except FileNotFoundError:
        # The next holder has just deleted it.
        return number, b""


def _file(number: int) -> str:
    return f"{FOLDER}/{number:010d}"


def _check(store: Store, number: int, token: str) -> None:
    """Raise RunTakenError unless this lease is the newest one."""
    store.refresh(FOLDER)
    found, content = newest(store)
    holder = decode(content)
    if found == number and holder is not None and holder.token == token:
        return
    where = store.locate()
    if found > number:
        message = f"{holder or 'another process'} has taken over {where}, because this run gave no sign of life"
    else:
        message = f"the lease of this run is gone from {where}/{FOLDER}"
    raise RunTakenError(f"{message}: nothing more is committed here", _HINT)


@dataclass(frozen=True)
class Fence:
    """The leases under which a run commits: the place, number and token of each, the checkpoints' own last."""

    leases: tuple[tuple[str, int, str], ...] = ()

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Fence:
        """Inverse of `dataclasses.asdict`."""
        return Fence(tuple((place, number, token) for place, number, token in raw["leases"]))

    @property
    def number(self) -> int:
        """The fencing number of a commit; 0 without a lease."""
        return self.leases[-1][1] if self.leases else 0

    def check(self) -> None:
        """Raise RunTakenError if another process has taken over."""
        for place, number, token in self.leases:
            _check(open_store(place), number, token)


NO_FENCE = Fence()


class Candidate:
    """A process that wants a folder, and what it has seen of the holder. Times are those of its own clock."""

    def __init__(self, place: str, own: Holder, evicts_own: bool = False) -> None:
        """With `evicts_own` it does not wait for a holder of its own launch, which must not commit any more."""
        self.store, self.place, self.own, self._evicts_own = open_store(place), place, own, evicts_own
        self.holder: Holder | None = None
        self.waited_s = self.silent_s = 0.0
        self._seen: tuple[int, bytes] | None = None
        self._began_s = self._changed_s = 0.0
        self._changes = -1

    def attempt(self, now_s: float) -> Lease | None:
        """Take the folder if it is free; RunTakenError if its holder lives on."""
        found = newest(self.store)
        if found != self._seen:
            self._seen, self._changed_s = found, now_s
            self._changes += 1
            if not self._changes:
                self._began_s = now_s
        number, content = found
        self.holder = decode(content)
        self.waited_s, self.silent_s = now_s - self._began_s, now_s - self._changed_s
        expired = self.silent_s >= self.lease_s
        if not number or expired or (self.holder is not None and self.holder.has_ended):
            return self._take(number + 1, contested=expired)
        if self._evicts_own and self._follows_its_own(contested=False):
            # It may be alive on another node, in the middle of a save: its commit will fail.
            return self._take(number + 1, contested=True)
        if self._changes and self.waited_s >= WAIT_LEASES * self.lease_s and self.silent_s < self.lease_s / 2:
            raise RunTakenError(f"{self.holder or 'another process'} trains in {self.store.locate()} already", _HINT)
        return None

    @property
    def lease_s(self) -> float:
        """The expiry that the holder has promised to keep."""
        return self.holder.lease_s if self.holder is not None else self.own.lease_s

    def _take(self, number: int, contested: bool) -> Lease | None:
        try:
            self.store.create(_file(number), self.own.encode())
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in FULL or not self._follows_its_own(contested):
                raise
            # The disk is full, but the file of the process that this one replaces can be written in place.
            number -= 1
            self.store.overwrite(_file(number), self.own.encode())
        # What counts is the file that is there now: the answer may have been lost, or another process was first.
        found, content = newest(self.store)
        holder = decode(content)
        if found != number or holder is None or holder.token != self.own.token:
            return None
        for name in self.store.names(FOLDER):
            if name.isdecimal() and int(name) < number:
                self.store.remove(f"{FOLDER}/{name}")
        return Lease(self.store, self.place, self.own, number, contested)

    def _follows_its_own(self, contested: bool) -> bool:
        """Whether the holder was started by the same launcher, which replaces one process by one."""
        return not contested and self.holder is not None and self.holder.launch == self.own.launch != ""


class Lease:
    """A folder that this process holds. `contested` means that the holder before it may still be alive."""

    def __init__(self, store: Store, place: str, own: Holder, number: int, contested: bool) -> None:
        self._store, self._place, self._own, self.number, self.contested = store, place, own, number, contested
        self.lost: RunTakenError | None = None
        """Why this process no longer holds the folder, once a heartbeat has found that."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_closed, name="lease", daemon=True)

    @property
    def entry(self) -> tuple[str, int, str]:
        """For a Fence."""
        return self._place, self.number, self._own.token

    def start(self) -> None:
        """Keep the lease alive from a thread."""
        self._thread.start()

    def beat(self) -> None:
        """One heartbeat, and a look for a successor. Storage that fails is no reason to stop: a commit checks again."""
        with suppress(OSError):
            try:
                _check(self._store, self.number, self._own.token)
                self._own = replace(self._own, heartbeat=self._own.heartbeat + 1)
                self._store.overwrite(_file(self.number), self._own.encode())
            except RunTakenError as error:
                self.lost = error

    def release(self) -> None:
        """Leave the folder to the next run, which then need not wait."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._own = replace(self._own, state="released")
        if self.lost is None:
            self.beat()

    def _beat_until_closed(self) -> None:
        while self.lost is None and not self._closed.wait(self._own.lease_s / HEARTBEATS):
            self.beat()


class Leases:
    """The folders that a run holds, each until the end of the block. Without an `own` holder, `hold` does nothing."""

    def __init__(self, own: Holder | None, stopped: Callable[[], bool], note: Callable[[str], None]) -> None:
        self._own, self._stopped, self._note = own, stopped, note
        self._evicts_own = False
        self._held: list[Lease] = []

    def lead(self, own: Holder, evicts_own: bool = False) -> None:
        """This process holds from now on what `hold` is called for; `evicts_own` as for Candidate."""
        self._own, self._evicts_own = own, evicts_own

    def hold(self, place: Path | str) -> None:
        """Wait for a holder that ends, take over from one without heartbeats, else raise RunTakenError."""
        if self._own is not None:
            self._held.append(_acquire(Candidate(str(place), self._own, self._evicts_own), self._stopped, self._note))
            self._held[-1].start()

    @property
    def fence(self) -> Fence:
        """What commits are checked against."""
        return Fence(tuple(lease.entry for lease in self._held))

    @property
    def contested(self) -> bool:
        """Whether a former holder may still be alive, perhaps in the middle of a save."""
        return any(lease.contested for lease in self._held)

    def raise_if_lost(self) -> None:
        """Raise RunTakenError if a heartbeat has found a successor. Cheap: it reads no file."""
        for lease in self._held:
            if lease.lost is not None:
                raise lease.lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lease in reversed(self._held):
            lease.release()


def _acquire(candidate: Candidate, stopped: Callable[[], bool], note: Callable[[str], None]) -> Lease:
    where, noted_s = candidate.store.locate(), -_NOTICE_S
    while True:
        try:
            lease = candidate.attempt(time.monotonic())
        except OSError as error:
            if error.errno in FULL:
                raise  # there may be room soon: the caller waits
            kind = StorageError if error.errno is None else CheckpointError
            message = f"{where} cannot be leased: {error.strerror or error}"
            raise kind(message, "check that this process may write there") from error
        who = candidate.holder or "another process"
        if lease is not None:
            if lease.contested:
                note(f"notice: {who} gave no sign of life for {candidate.silent_s:.0f} s: taking over {where}")
            return lease
        if candidate.waited_s - noted_s >= _NOTICE_S:
            noted_s = candidate.waited_s
            left_s = max(0.0, candidate.lease_s - candidate.silent_s)
            note(f"notice: {who} trains in {where}: waiting for its end, or {left_s:.0f} s without a sign of life")
        if stopped():
            raise StopRequested(f"stopped on request while waiting for {where}")
        time.sleep(_POLL_S)
