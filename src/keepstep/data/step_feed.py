"""One rank's micro batches for each step, read ahead by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from keepstep.core.errors import ConfigError
from keepstep.core.messages import invalid_value
from keepstep.data.batch import Batch
from keepstep.data.loader import Loader

_CLOSE_WAIT_S = 1.0
_WAIT_NOTICE_S = 1.0

_Ready = queue.Queue[Batch | BaseException]


class WaitCancelledError(Exception):
    """The caller stopped waiting for data that did not arrive."""


class StepFeed:
    """One rank's micro batches, step by step.

    Micro batch j of a global batch belongs to rank j % ranks; with `uneven`, some ranks have one more. Steps leave out
    the sample ranges (first, count) in `skipped`. `next_step` raises an error of the reading thread.
    """

    def __init__(
        self,
        loader: Loader,
        at: int,
        global_batch: int,
        microbatch: int,
        rank: int,
        ranks: int,
        prefetch: int,
        *,
        uneven: bool = False,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        if global_batch % microbatch or (not uneven and global_batch % (microbatch * ranks)):
            raise ConfigError(
                invalid_value(
                    "global_batch",
                    global_batch,
                    f"must be a multiple of microbatch × data ranks ({microbatch} × {ranks})",
                ),
                f"global_batch={-(-global_batch // (microbatch * ranks)) * microbatch * ranks} would fit",
            )
        self._loader = loader
        self._global_batch = global_batch
        self._microbatch = microbatch
        self._offsets = [microbatch * number for number in range(rank, self.microbatches, ranks)]
        self.position = at
        """Global samples consumed by the steps handed out so far, over all ranks, skipped ones included."""
        self._skipped = tuple(skipped)
        self._prefetch = max(1, prefetch)
        self._start_reading()

    @property
    def microbatches(self) -> int:
        """Micro batches of a global batch, over all ranks."""
        return self._global_batch // self._microbatch

    def next_step(
        self, on_wait: Callable[[], None] = lambda: None, cancelled: Callable[[], bool] = lambda: False
    ) -> list[Batch]:
        """This rank's micro batches of the next step.

        While they have not arrived, `on_wait` is called about once a second. Raises WaitCancelledError as soon as
        `cancelled` returns true then.
        """
        batches = [self._take(on_wait, cancelled) for _ in self._offsets]
        self.position = step_start(self.position, self._global_batch, self._skipped) + self._global_batch
        return batches

    def rewind(self, at: int, skipped: Sequence[tuple[int, int]]) -> None:
        """Continue from another position, without these samples."""
        self.close()
        self.position, self._skipped = at, tuple(skipped)
        self._start_reading()

    def redeal(self, at: int, microbatches: Sequence[int]) -> None:
        """Continue from position `at` with these micro batches of every global batch."""
        self._offsets = [self._microbatch * number for number in microbatches]
        self.rewind(at, self._skipped)

    def _start_reading(self) -> None:
        # Each thread has its own queue and its own event: one that is still busy with a file cannot disturb the next.
        self._closed = threading.Event()
        self._ready: _Ready = queue.Queue(maxsize=self._prefetch)
        arguments = (self.position, self._skipped, self._ready, self._closed)
        self._thread = threading.Thread(target=self._read_ahead, args=arguments, name="keepstep-data", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading ahead; safe to call twice. A thread that waits for an unreachable store ends by itself."""
        self._closed.set()
        with suppress(queue.Empty):
            # Makes room, so that a thread that waits for some ends immediately.
            self._ready.get_nowait()
        self._thread.join(timeout=_CLOSE_WAIT_S)

    def _take(self, on_wait: Callable[[], None], cancelled: Callable[[], bool]) -> Batch:
        if self._closed.is_set():
            raise RuntimeError("the feed is closed")
        while True:
            try:
                found = self._ready.get(timeout=_WAIT_NOTICE_S)
                break
            except queue.Empty:
                on_wait()
                if cancelled():
                    raise WaitCancelledError from None
        if isinstance(found, BaseException):
            # Put it back for a caller who tries again: the thread has ended and would never answer.
            self._ready.put(found)
            raise found
        return found

    def _read_ahead(self, at: int, skipped: Sequence[tuple[int, int]], ready: _Ready, closed: threading.Event) -> None:
        try:
            while self._offsets and not closed.is_set():
                at = step_start(at, self._global_batch, skipped)
                for offset in self._offsets:
                    if not _put(self._loader.rows(at + offset, self._microbatch), ready, closed):
                        return
                at += self._global_batch
        except BaseException as error:
            _put(error, ready, closed)


def _put(item: Batch | BaseException, ready: _Ready, closed: threading.Event) -> bool:
    """Wait for room in the queue; False where the feed was closed meanwhile."""
    while not closed.is_set():
        try:
            ready.put(item, timeout=0.2)
            return True
        except queue.Full:
            continue
    return False


def step_start(at: int, count: int, skipped: Sequence[tuple[int, int]]) -> int:
    """The first position from `at` on where `count` consecutive samples contain no skipped one."""
    for first, length in sorted(skipped):
        if at < first + length and first < at + count:
            at = first + length
    return at
