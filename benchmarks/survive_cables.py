"""Pulls the cable between two hosts of a run that survives: two network namespaces of this machine. Needs root."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.chaos.experiment import UnavailableError, wait_for_step
from keepstep.chaos.two_hosts import TwoHosts
from keepstep.core import failpoints
from keepstep.core.errors import EXIT_STOPPED
from keepstep.observe.run_folder import JsonLines, RunFolder

NAME = "cables"
SLOW = {failpoints.VARIABLE: "applied:sleep=0.05"}
"""Steps of a tiny model are short: with these a cycle has some hundred of them."""
PATIENCE_S = 120.0
RESULTS = (
    "cable_pulls", "cable_restarts", "cable_stall_median_s", "cable_join_stall_s", "cable_losses_equal",
    "cable_weights_equal",
)  # fmt: skip


def pull(folder: Path, pulls: int, words: Sequence[str]) -> dict[str, Any]:
    """Pull the cable, wait until the first host has noticed, plug it in, and wait for the second host; again and again.

    Then the run saves and stops. The results are null where there are no network namespaces, with the reason.
    """
    run = RunFolder(folder / NAME)
    try:
        with TwoHosts(folder / f"{NAME}.log", {"OMP_NUM_THREADS": "1", **SLOW}) as hosts:
            for host in (0, 1):
                hosts.start(host, 1, [*words, f"runs_dir={folder}", f"name={NAME}", "max_duration=1000000ba"])
            if not wait_for_step(run, 5, PATIENCE_S):
                raise TimeoutError((folder / f"{NAME}.log").read_text()[-2000:])
            for number in range(1, pulls + 1):
                hosts.set_link("down")
                _wait_for(run, "left", number)
                hosts.set_link("up")
                _wait_for(run, "joined", number)
            hosts.agents[0].send_signal(signal.SIGTERM)
            code = hosts.wait(PATIENCE_S)
            if code != EXIT_STOPPED:
                raise RuntimeError(f"the run ended with {code}:\n{(folder / f'{NAME}.log').read_text()[-2000:]}")
    except UnavailableError as error:
        return {**dict.fromkeys(RESULTS), "cables_left_out": str(error)}
    events = JsonLines(run.events).read()
    left, joined = ([each for each in events if each["kind"] == kind] for kind in ("left", "joined"))
    return {
        "cable_pulls": pulls,
        "cables_left_out": None,
        "cable_restarts": sum(each["kind"] in ("restart", "resume") for each in events),
        "cable_stall_median_s": round(statistics.median(each["stall_s"] for each in left), 3),
        "cable_join_stall_s": round(statistics.median(each["stall_s"] for each in joined), 3),
    }


def _wait_for(run: RunFolder, kind: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while sum(event["kind"] == kind for event in JsonLines(run.events).read()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no event {kind} number {count} in {PATIENCE_S:g} s")
        time.sleep(0.02)
