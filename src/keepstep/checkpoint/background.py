"""The trainer's end of the writer process: start it, hand it jobs, hear its reports."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import keepstep
from keepstep.checkpoint.writer import Job
from keepstep.core.errors import CheckpointError


class WriterProcess:
    """One writer, alive until `close` or its own death; a death is reported like any other failure."""

    def __init__(self, snapshot_handle: int) -> None:
        # The writer must run our own sources, whatever this process's path looks like.
        paths = [str(Path(keepstep.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.checkpoint.writer", str(snapshot_handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(snapshot_handle,),
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
        """Hand over a job; a report for it will come, even if the writer is dead."""
        self._send(job.to_json())

    def serve(self, place: str, secret: str) -> int:
        """Have it accept copies from other nodes into `place`; returns its port. Only while no job is under way."""
        self._send(json.dumps({"serve": place, "secret": secret}))
        report = self._reports.get()
        if report["kind"] != "serving":
            raise CheckpointError(f"copies from other nodes cannot be taken: {report['message']}")
        return int(report["port"])

    def abort(self, token: str) -> None:
        """Tell a committing writer that some rank's part will never come."""
        self._send(json.dumps({"abort": token}))

    def fail(self, message: str) -> None:
        """Put a failure of our own side in the place of the report that will not come."""
        self._reports.put({"kind": "failed", "message": message, "seconds": 0.0})

    def report(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next report; None when there is none within the time (0 looks without waiting)."""
        try:
            return self._reports.get(block=timeout_s != 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let it finish what it has and end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._thread.join()
        self._process.stdout.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            # Dead: the listener has said so, or is about to.
            pass

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._reports.put(json.loads(line))
        code = self._process.wait()
        self._reports.put(
            {"kind": "failed", "message": f"the writer process ended with exit code {code}", "seconds": 0.0}
        )
