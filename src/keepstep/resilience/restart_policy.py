"""What to do after a fault: restart, restart after a pause, wait for room on a full disk, or give up."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import KeepstepError
from keepstep.core.units import format_bytes, format_seconds
from keepstep.resilience.failure_cause import NEEDS_TIME, Cause, Kind

LONGEST_PAUSE_S = 60.0
LIMITED_RESTARTS: dict[Kind, int] = {"oom": 1, "access": 1}
"""Restarts without progress for faults that rarely heal."""
ROOM_POLL_S = 1.0
LARGE_ROOM_BYTES = 64 * 1024 * 1024
"""A disk with more free space than this is not full: a quota or a lack of inodes stopped the write."""
BLIND_RETRY_S = 30.0
MIN_ROOM_BYTES = 1024 * 1024
"""What a full disk must gain before a restart, where the fault does not say how much is needed."""
_HINTS: dict[Kind, str] = {
    "oom": "lower microbatch or set compute.recompute=full",
    "full": "free some space there, then start the same command again",
    "hang": "the stacks of all processes are in {logs}",
    "storage": "check the storage, then start the same command again",
    "access": "check that the path exists and that you may use it",
}


@dataclass(frozen=True)
class Decision:
    """What happens after a fault."""

    restart: bool
    pause_s: float = 0.0
    """Before the restart."""
    wait_for_room: bool = False
    """Restart only when the full disk has room again."""


class RestartPolicy:
    """Counts attempts without progress. A step that was never reached before is progress."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._furthest = -1
        self.attempts = 0
        """Failed attempts since the last progress; a full disk does not count."""

    def decide(self, cause: Cause, step: int) -> Decision:
        """`step` is the newest step that the failed attempt has finished, or -1."""
        if step > self._furthest:
            self._furthest, self.attempts = step, 0
        if not cause.restartable or not self._max_restarts:
            self.attempts += 1
            return Decision(restart=False)
        if cause.kind == "full":
            return Decision(restart=True, wait_for_room=True)
        self.attempts += 1
        if self.attempts > self._limit(cause):
            return Decision(restart=False)
        pause_s = min(LONGEST_PAUSE_S, 0.5 * 2 ** (self.attempts - 1)) if cause.kind in NEEDS_TIME else 0.0
        return Decision(restart=True, pause_s=pause_s)

    def _limit(self, cause: Cause) -> int:
        if cause.kind == "access" and self._furthest >= 0:
            # The path was usable before: a mount may come back.
            return self._max_restarts
        if cause.kind == "access" and not cause.traceback:
            # Our own code checked the path. An error inside a library may be a race and gets one more attempt.
            return 0
        return min(self._max_restarts, LIMITED_RESTARTS.get(cause.kind, self._max_restarts))

    def report(self, cause: Cause, logs: Path) -> KeepstepError:
        """The one error that the terminal gets when the run ends."""
        where = f"rank {cause.rank} on {cause.host}: " if cause.rank > 0 and cause.traceback else ""
        given_up = f" (given up after {self.attempts} attempts without progress)" if self.attempts > 1 else ""
        hint = cause.hint or _HINTS.get(cause.kind, "").format(logs=logs)
        if cause.traceback and not hint:
            hint = f"the traceback is in {logs}; keepstep runs logs {logs.parent} prints it"
        return KeepstepError(f"{where}{cause.message}{given_up}", hint or None)


class FullDisk:
    """Waits until a full disk has room again, for `wait_s` at most from when it was found full."""

    def __init__(self, wait_s: float, run_folder: Path | None, scratch: Path) -> None:
        self._wait_s, self._run_folder, self._scratch = wait_s, run_folder, scratch
        self._since: float | None = None

    def clear(self) -> None:
        """Start over: a step was finished since."""
        self._since = None

    def wait(self, cause: Cause, can_rescue: bool) -> bool:
        """Wait for room; False when the time for that is over."""
        folder = self._folder(cause)
        free_bytes = shutil.disk_usage(folder).free
        needed_bytes = max(cause.needed_bytes, free_bytes + MIN_ROOM_BYTES)
        # A quota or a lack of inodes does not show in the free space: then only another attempt can tell.
        visible = free_bytes < max(cause.needed_bytes, LARGE_ROOM_BYTES)
        now = time.monotonic()
        if self._since is None:
            self._since = now
            what = f"for {format_bytes(needed_bytes)} free in {folder}" if visible else "for room"
            self._print_notice(cause, what, can_rescue)
        deadline = self._since + self._wait_s
        retry_at = deadline if visible else now + BLIND_RETRY_S
        while time.monotonic() < deadline:
            time.sleep(min(ROOM_POLL_S, max(0.0, deadline - time.monotonic())))
            if shutil.disk_usage(folder).free >= needed_bytes or time.monotonic() > retry_at:
                return time.monotonic() < deadline
        return False

    def _folder(self, cause: Cause) -> Path:
        """The folder that the fault names, else the fullest of those that a run writes to."""
        named = [Path(cause.path)] if cause.path else [path for path in (self._run_folder, self._scratch) if path]
        folders = [next(place for place in (path, *path.parents) if place.exists()) for path in named]
        return min(folders, key=lambda folder: shutil.disk_usage(folder).free)

    def _print_notice(self, cause: Cause, what: str, can_rescue: bool) -> None:
        hint = "free some space"
        if self._run_folder is not None and can_rescue:
            hint += f", or save the newest step elsewhere: keepstep ckpt rescue {self._run_folder} --to FOLDER"
        wait = f"waiting up to {format_seconds(self._wait_s)} {what}"
        print(f"warning: {cause.message}; {wait}\n hint: {hint}", file=sys.stderr, flush=True)
