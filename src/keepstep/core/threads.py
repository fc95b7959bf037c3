"""A thread pool that an interrupted command does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(act: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """`[act(item) for item in items]` in several threads.

    After the first error no new item is started, and the error is raised when the running ones have ended. An interrupt
    is raised immediately: a thread may wait minutes for a store, and Python's own pools would keep the process alive.
    """
    left = iter(enumerate(items))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    choosing = threading.Lock()

    def work() -> None:
        while not errors:
            with choosing:
                number, item = next(left, (-1, None))
            if number < 0:
                return
            try:
                results[number] = act(item)  # type: ignore[arg-type]
            except BaseException as error:  # raised after the threads have ended
                errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(max(1, threads))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as interrupt:
        errors.append(interrupt)
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
