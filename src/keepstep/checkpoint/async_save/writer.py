"""The writer: a process without torch that hashes, writes, syncs and commits the content of the staging buffer.

There is one per rank, started once and not forked from the trainer (copy-on-write faults cost seconds). It maps the
staging buffer, reads jobs as JSON lines from stdin and writes reports as JSON lines to stdout (`WriterProcess` is the
trainer's side). When the trainer dies, the writer still finishes its job: the buffer outlives the trainer, so a crash
during a save need not lose the save.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keepstep
from keepstep.checkpoint.node_local.replicas import Peers, serve
from keepstep.checkpoint.protocol import commit, parity, retention
from keepstep.checkpoint.protocol.commit import Attempt
from keepstep.checkpoint.protocol.lease import NO_FENCE, Fence
from keepstep.checkpoint.protocol.manifest import LATEST
from keepstep.checkpoint.protocol.shards import PieceSpec
from keepstep.checkpoint.storage.store import Store, open_store
from keepstep.core.errors import CheckpointError, KeepstepError, RunTakenError
from keepstep.core.requests import take_requests
from keepstep.core.step_folders import MARKER

COMMIT_TIMEOUT_S = 1800.0
ORPHAN_TIMEOUT_S = 30.0
"""How long a writer whose trainer has died waits for the parts of the other ranks."""
HINTS: dict[int | None, str] = {
    errno.EDQUOT: "free some space in your quota, ask for a larger one, or lower checkpoint.keep",
    errno.EROFS: "the kernel's log says why it is read-only; then mount it writable again (mount -o remount,rw)",
}
"""What to do about errors of the storage that a message alone does not explain."""


@dataclass(frozen=True)
class Publication:
    """What only the committing rank needs to know."""

    values: dict[str, Any]
    metadata: dict[str, Any]
    rules: retention.Rules
    parity: int
    fence: Fence = NO_FENCE


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
        """The job as one line of JSON."""
        body = {**self.__dict__, "attempt": asdict(self.attempt), "specs": [spec.to_json() for spec in self.specs]}
        body["publication"] = asdict(self.publication) if self.publication else None
        body["peers"] = asdict(self.peers) if self.peers else None
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(body: dict[str, Any]) -> Job:
        """Inverse of `to_json`."""
        body["attempt"] = Attempt(**body["attempt"])
        body["specs"] = [PieceSpec.from_json(raw) for raw in body["specs"]]
        publication = body["publication"]
        if publication:
            publication["rules"] = retention.Rules(**publication["rules"])
            publication["fence"] = Fence.from_json(publication["fence"])
            body["publication"] = Publication(**publication)
        body["peers"] = Peers.from_json(body["peers"]) if body["peers"] else None
        return Job(**body)


class WriterProcess:
    """One writer process; its death is reported like any other failure."""

    def __init__(self, staging_fd: int) -> None:
        # The writer must import this very package, whatever sys.path looks like.
        paths = [str(Path(keepstep.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.checkpoint.async_save.writer", str(staging_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(staging_fd,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="checkpoint-reports", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return self._process.poll() is None

    def submit(self, job: Job) -> None:
        """Send a job; there will be a report for it, even if the writer is dead."""
        self._send(job.to_json())

    def serve(self, place: str, secret: str) -> int:
        """Let it receive copies from other nodes into `place`; returns its port. Only call this between jobs."""
        self._send(json.dumps({"serve": place, "secret": secret}))
        report = self._reports.get()
        if report["kind"] != "serving":
            raise CheckpointError(f"copies from other nodes cannot be received: {report['message']}")
        return int(report["port"])

    def abort(self, token: str) -> None:
        """Tell a committing writer that the part of some rank will never arrive."""
        self._send(json.dumps({"abort": token}))

    def fail(self, message: str) -> None:
        """Report a failure on our side, in place of the writer's report."""
        self._reports.put({"kind": "failed", "message": message})

    def report(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next report, or None after the timeout (0 does not wait, None waits forever)."""
        try:
            return self._reports.get(block=timeout_s != 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let it finish its job and exit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._thread.join()
        self._process.stdout.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # If the writer is dead, the listener reports that.
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._reports.put(json.loads(line))
        self.fail(f"the writer process ended with exit code {self._process.wait()}")


def perform(job: Job, data: memoryview, stop: Callable[[], bool]) -> dict[str, Any]:
    """Write this rank's part and, on the committing rank, commit the step; returns a report for the trainer."""
    store = open_store(job.place)
    with retention.writing(store, job.attempt.folder):
        began = time.monotonic()
        try:
            extra = {"holds": job.holds, "rank_values": job.rank_values}
            commit.write_part(store, job.attempt, job.rank, job.specs, data, extra, job.threads, job.peers)
            if job.publication is None:
                return {"kind": "written"}
            return {**_publish(store, job, job.publication, stop), "seconds": time.monotonic() - began}
        except Exception as error:  # any failure must reach the trainer as a report
            message = error.message if isinstance(error, KeepstepError) else f"{type(error).__name__}: {error}"
            _give_up(store, job, message)
            number = error.errno if isinstance(error, OSError) else None
            full = number in (errno.ENOSPC, errno.EDQUOT)
            taken = error.hint if isinstance(error, RunTakenError) else None
            return {"kind": "failed", "message": message, "full": full, "taken": taken, "hint": HINTS.get(number)}


def _publish(store: Store, job: Job, publication: Publication, stop: Callable[[], bool]) -> dict[str, Any]:
    parts = commit.await_parts(store, job.attempt, stop, COMMIT_TIMEOUT_S)
    manifest = commit.compose(job.attempt, parts, publication.values, publication.metadata)
    if publication.parity:
        manifest = parity.add(store, job.attempt.folder, job.attempt.token, manifest)
    notes: list[str] = []
    elsewhere = job.peers is not None
    committed = commit.publish(store, job.attempt, manifest, elsewhere, notes.append, publication.fence)
    try:
        retired = retention.apply(store, publication.rules, notes.append, elsewhere=elsewhere)
        if job.peers is not None:
            names = (f"{committed.name}/{committed.marker.manifest}", f"{committed.name}/{MARKER}", LATEST)
            job.peers.send_published({name: store.read(name) for name in names}, retired)
    except (OSError, CheckpointError) as error:
        notes.append(f"the step is committed, but cleaning up after it failed: {error}")
    return {"kind": "committed", "folder": committed.name, "marker": asdict(committed.marker), "notes": notes}


def _give_up(store: Store, job: Job, message: str) -> None:
    """Free the space and tell the committing rank not to wait. This may fail as well: the disk may be the problem."""
    with suppress(OSError, CheckpointError):
        # A step with a marker is committed, whatever failed after that: its files must stay.
        if MARKER not in store.names(job.attempt.folder):
            store.remove(f"{job.attempt.folder}/{job.attempt.file_name(job.rank)}")
        commit.announce(store, job.attempt, job.rank, {"error": message}, job.peers)


class _Inbox:
    """Lines from the trainer, read by a thread so that `abort` takes effect during a job."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._aborted: set[str] = set()
        self._orphaned_at: float | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            try:
                body = json.loads(line)
            except ValueError:
                # The trainer was killed while it wrote this line; nothing follows.
                break
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
    """Do jobs with the staging buffer of the given file descriptor until stdin closes."""
    # Ctrl-C and a launcher's SIGTERM reach the whole process group; the trainer handles them and closes our stdin.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    fd = int(arguments[0])
    inbox = _Inbox()
    memory: mmap.mmap | None = None
    while (job := inbox.jobs.get()) is not None:
        if memory is None or len(memory) < job.size_bytes:
            # A mapping cannot be empty, but a rank without tensors still writes its part file.
            memory = mmap.mmap(fd, max(os.fstat(fd).st_size, 1), prot=mmap.PROT_READ)
        token = job.attempt.token
        with memoryview(memory) as view, view[: job.size_bytes] as data:
            report = perform(job, data, lambda token=token: inbox.given_up(token))  # type: ignore[misc]
        try:
            print(json.dumps({**report, "requests": take_requests()}), flush=True)
        except BrokenPipeError:
            # The trainer is gone; the commit is valid without it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
