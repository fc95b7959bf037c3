"""The writer: a process without torch that hashes, writes, syncs and commits what the trainer copied aside.

One a rank, started once, never forked from the trainer (copy-on-write faults cost seconds). It maps the trainer's
snapshot memory, takes jobs as JSON lines on stdin and reports as JSON lines on stdout. When the trainer dies it still
finishes the job it has: the snapshot outlives the trainer, so a crash during a save does not have to cost the save.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from keepstep.checkpoint import commit, parity, retention
from keepstep.checkpoint.commit import Attempt
from keepstep.checkpoint.manifest import LATEST, MARKER, StepFolder
from keepstep.checkpoint.peers import Peers, serve
from keepstep.checkpoint.shards import PieceSpec
from keepstep.checkpoint.store import Store, open_store
from keepstep.core.errors import CheckpointError

COMMIT_TIMEOUT_S = 1800.0
ORPHAN_TIMEOUT_S = 30.0
"""How long a writer whose trainer died waits for the other ranks' parts."""


@dataclass(frozen=True)
class Publication:
    """What only the committing rank needs."""

    values: dict[str, Any]
    metadata: dict[str, Any]
    rules: retention.Rules
    parity: int


@dataclass(frozen=True)
class Job:
    """One rank's part of one save."""

    place: str
    attempt: Attempt
    rank: int
    size_bytes: int
    specs: list[PieceSpec]
    holds: dict[str, Any]
    rank_values: dict[str, Any]
    publication: Publication | None
    threads: int = 1
    peers: Peers | None = None

    def to_json(self) -> str:
        """One line."""
        body = {**self.__dict__, "attempt": asdict(self.attempt), "specs": [spec.to_json() for spec in self.specs]}
        body["publication"] = asdict(self.publication) if self.publication else None
        body["peers"] = asdict(self.peers) if self.peers else None
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(body: dict[str, Any]) -> Job:
        """The way back."""
        body["attempt"] = Attempt(**body["attempt"])
        body["specs"] = [PieceSpec.from_json(raw) for raw in body["specs"]]
        publication = body["publication"]
        if publication:
            publication["rules"] = retention.Rules(**publication["rules"])
            body["publication"] = Publication(**publication)
        body["peers"] = Peers.from_json(body["peers"]) if body["peers"] else None
        return Job(**body)


def perform(job: Job, data: memoryview, stop: Callable[[], bool]) -> dict[str, Any]:
    """Write this rank's part and, on the committing rank, publish the step; the report says how it went."""
    store = open_store(job.place)
    with retention.writing(store, job.attempt.folder):
        return _perform(store, job, data, stop)


def _perform(store: Store, job: Job, data: memoryview, stop: Callable[[], bool]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        extra = {"holds": job.holds, "rank_values": job.rank_values}
        commit.write_part(store, job.attempt, job.rank, job.specs, data, extra, job.threads, job.peers)
        written_s = time.monotonic() - began
        report: dict[str, Any] = {"kind": "written", "step": job.attempt.step, "seconds": written_s}
        if job.publication is not None:
            committed, notes = _publish(store, job, job.publication, stop)
            report |= {
                "kind": "committed",
                "folder": committed.name,
                "marker": asdict(committed.marker),
                "notes": notes,
            }
            report["seconds"] = time.monotonic() - began
        return report
    except Exception as error:  # whatever it is, the trainer must hear of it and go on
        message = error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        _give_up(store, job, message)
        return {"kind": "failed", "step": job.attempt.step, "message": message, "seconds": time.monotonic() - began}


def _publish(
    store: Store, job: Job, publication: Publication, stop: Callable[[], bool]
) -> tuple[StepFolder, list[str]]:
    parts = commit.await_parts(store, job.attempt, stop, COMMIT_TIMEOUT_S)
    manifest = commit.compose(job.attempt, parts, publication.values, publication.metadata)
    if publication.parity:
        manifest = parity.add(store, job.attempt.folder, job.attempt.token, manifest)
    notes: list[str] = []
    committed = commit.publish(store, job.attempt, manifest, job.peers is not None, notes.append)
    try:
        retired = retention.apply(store, publication.rules, notes.append, elsewhere=job.peers is not None)
        if job.peers is not None:
            names = (f"{committed.name}/{committed.marker.manifest}", f"{committed.name}/{MARKER}", LATEST)
            job.peers.send_published({name: store.read(name) for name in names}, retired)
    except (OSError, CheckpointError) as error:
        notes.append(f"the step is committed, but not all was tidied up after it: {error}")
    return committed, notes


def _give_up(store: Store, job: Job, message: str) -> None:
    """Free the space and tell the committing rank not to wait; the disk may be the very thing that failed."""
    try:
        # A step that has its marker exists, whatever went wrong after that: its files are not ours to take back.
        if MARKER not in store.names(job.attempt.folder):
            store.remove(f"{job.attempt.folder}/{job.attempt.file_name(job.rank)}")
        commit.announce(store, job.attempt, job.rank, {"error": message}, job.peers)
    except (OSError, CheckpointError):
        pass


class _Inbox:
    """Lines from the trainer, read by a thread so that `abort` is heard in the middle of a job."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._aborted: set[str] = set()
        self._orphaned_at: float | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            body = json.loads(line)
            if "abort" in body:
                self._aborted.add(body["abort"])
            elif "serve" in body:
                port = serve(open_store(body["serve"]), body["secret"])
                print(json.dumps({"kind": "serving", "port": port}), flush=True)
            else:
                self.jobs.put(Job.from_json(body))
        self._orphaned_at = time.monotonic()
        self.jobs.put(None)

    def given_up(self, token: str) -> bool:
        """Whether to stop waiting for the other ranks."""
        if token in self._aborted:
            return True
        return self._orphaned_at is not None and time.monotonic() - self._orphaned_at > ORPHAN_TIMEOUT_S


def main(arguments: list[str]) -> int:
    """Serve jobs from the snapshot memory behind the given file descriptor until stdin closes."""
    # A Ctrl-C or a launcher's SIGTERM goes to the whole group; the trainer decides what it means and closes our stdin.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handle = int(arguments[0])
    inbox = _Inbox()
    memory: mmap.mmap | None = None
    while (job := inbox.jobs.get()) is not None:
        if memory is None or len(memory) < job.size_bytes:
            # A mapping cannot be empty; an empty share still has a part file to write.
            memory = mmap.mmap(handle, max(os.fstat(handle).st_size, 1), prot=mmap.PROT_READ)
        token = job.attempt.token
        with memoryview(memory) as view, view[: job.size_bytes] as data:
            report = perform(job, data, lambda token=token: inbox.given_up(token))  # type: ignore[misc]
        try:
            print(json.dumps(report), flush=True)
        except BrokenPipeError:
            # Nobody listens any more; the commit stands all the same.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
