"""A container that outlives the attempts of its node.

Volcano counts every restart of a pod, and a LeaderWorkerSet restarts every container that ends, even after success.
So one process stays and decides by the exit code what Job, JobSet and Trainer decide by a failure policy.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from keepstep.core.errors import EXIT_CONFIG, EXIT_DATA, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_STORAGE_FULL

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENDED = "this pod waits until the job is removed; its run ended with exit code"
"""Start of the last line of a pod that waits; `keepstep jobs` reads the code after it."""
_RETRY_CANNOT_HELP = (EXIT_DONE, EXIT_CONFIG, EXIT_DATA)


class _Attempts:
    """Runs the command as a child, one attempt after the other, and passes stop requests on."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self.asked: list[int] = []

    def request_stop(self, number: int, _: FrameType | None) -> None:
        """Signal handler: remember the request and pass it on."""
        self.asked.append(number)
        if self._child is not None:
            self._child.send_signal(number)

    def run(self) -> int:
        """One attempt. A code that is not keepstep's own, such as one of a signal, is a failure."""
        self._child = subprocess.Popen(self._command)
        for number in tuple(self.asked):
            self._child.send_signal(number)
        code = self._child.wait()
        return code if EXIT_DONE <= code <= EXIT_STORAGE_FULL or code == EXIT_STOPPED else EXIT_FAILED


def supervise(command: Sequence[str], retries: int | None) -> int:
    """Run the command again after exit code 75, unless this pod itself was asked to stop.

    With `retries` also after as many failures; then the process waits for a stop instead of ending.
    """
    attempts = _Attempts(command)
    for number in STOP_SIGNALS:
        signal.signal(number, attempts.request_stop)
    failures = 0
    while True:
        code = EXIT_STOPPED if attempts.asked else attempts.run()
        if attempts.asked:
            return code
        if code == EXIT_STOPPED:
            _report("saved and stopped on request of another pod: starting again")
            continue
        if retries is None:
            return code
        if code in _RETRY_CANNOT_HELP or failures >= retries:
            return _wait_for_stop(attempts, code)
        failures += 1
        _report(f"the attempt failed with exit code {code}: retry {failures} of {retries}")


def _wait_for_stop(attempts: _Attempts, code: int) -> int:
    # Blocked first: a request between the question and the wait stays pending until the wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if not attempts.asked:
        _report(f"{ENDED} {code}")
        signal.sigwait(STOP_SIGNALS)
    return code


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
