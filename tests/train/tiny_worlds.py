"""Several small runs with several processes each, quickly: children of one server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from keepstep.config.load import load_config
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import TINY


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keepstep.train.trainer"])
    return context


def run_world(
    root: Path,
    processes: int,
    *overrides: str,
    flip_weight_on: int = -1,
    poison_on: int = -1,
    ticks_s: Sequence[float] = (),
    stuck_on: int = -1,
) -> list[int]:
    """Train in this many processes; their exit codes, and what they said in `said_RANK.txt` of the folder.

    At the third step one rank may flip a bit of a weight, or have a NaN in its gradient. With `ticks_s` each rank has a
    clock of its own that goes on by this much whenever the loop looks at it. At the fourth step one rank
    may be asked to stop while its data does not come.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*TINY, f"runs_dir={root}", *overrides]
    workers = [
        _server().Process(
            target=_train,
            args=(words, rank, processes, port, root / f"said_{rank}.txt", flip_weight_on == rank, poison_on == rank),
            kwargs={"tick_s": ticks_s[rank] if ticks_s else 0.0, "stuck": stuck_on == rank},
        )
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + PATIENCE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    return [-1 if code is None else code for code in codes]


def _train(
    words: list[str],
    rank: int,
    processes: int,
    port: int,
    said: Path,
    flip: bool,
    poison: bool,
    *,
    tick_s: float,
    stuck: bool,
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    # One file for what the interpreter and what the libraries below it say.
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from keepstep.core.errors import KeepstepError
    from keepstep.train.trainer import train

    if flip or poison:
        _disturb(flip)
    if tick_s:
        _tick(tick_s)
    if stuck:
        _stick()
    try:
        train(load_config(None, words).config)
    except KeepstepError as error:
        print("\n".join(error.lines()), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _tick(tick_s: float) -> None:
    from itertools import count
    from types import SimpleNamespace

    from keepstep.train import steps_in_flight

    looks = count(1)
    steps_in_flight.time = SimpleNamespace(perf_counter=lambda: next(looks) * tick_s)  # type: ignore[attr-defined]


def _stick() -> None:
    from keepstep.data.step_feed import StepFeed

    calls, real = iter(range(1, 1000)), StepFeed.next_step

    def next_step(feed: StepFeed, *words: Any) -> Any:
        if next(calls) == 4:
            feed._ready = queue.Queue()
            os.kill(os.getpid(), signal.SIGTERM)
        return real(feed, *words)

    StepFeed.next_step = next_step  # type: ignore[assignment,method-assign]


def _disturb(flip: bool) -> None:
    import torch

    from keepstep.train.step import TrainStep

    calls = iter(range(1, 1000))

    def poison(step: TrainStep) -> bool:
        third = next(calls) == 3
        if third and flip:
            weight = step._model.embed.weight.data
            # The highest bit of a mantissa: far below what anybody would see in a loss curve.
            weight.view(torch.int32)[:, 0] ^= 1 << 22
        return third and not flip

    TrainStep.poison = property(lambda step: lambda: poison(step))
