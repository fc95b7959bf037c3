"""Several small runs with several processes each, quickly: children of one server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tiny_runs import TINY

from keepstep.config.load import load_config

TIMEOUT_S = 120


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keepstep.train.run"])
    return context


def run_world(root: Path, processes: int, *overrides: str) -> list[int]:
    """Train in this many processes; their exit codes, and what they said in `said_RANK.txt` of the folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*TINY, f"runs_dir={root}", *overrides]
    workers = [
        _server().Process(target=_train, args=(words, rank, processes, port, root / f"said_{rank}.txt"))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(TIMEOUT_S)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    return [-1 if code is None else code for code in codes]


def _train(words: list[str], rank: int, processes: int, port: int, said: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    # One file for what the interpreter and what the libraries below it say.
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from keepstep.core.errors import KeepstepError
    from keepstep.train.run import train

    try:
        train(load_config(None, words).config)
    except KeepstepError as error:
        print("\n".join(error.lines()), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
