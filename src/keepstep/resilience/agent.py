"""The processes of a run on this machine: torchrun's own agent, with exit codes and errors that mean something."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from keepstep.core.errors import EXIT_FAILED

EXIT_FILE = "KEEPSTEP_EXIT_FILE"
"""Environment variable: where the first process writes its exit code, because a signalled agent reports none."""


def run_processes(arguments: Sequence[str], processes: int) -> int:
    """Start `python -m keepstep ARGUMENTS` as `processes` ranks and return the run's exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Workers print their own error; the agent's account of it would bury that under a page of tables.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # With a shared store, keys of an earlier attempt leak into the next one and restarts race.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    with tempfile.TemporaryDirectory(prefix="keepstep-") as scratch:
        exit_file = Path(scratch) / "exit"
        os.environ[EXIT_FILE] = str(exit_file)
        failed = EXIT_FAILED
        try:
            elastic_launch(config, sys.executable)("-m", "keepstep", *arguments)
            return 0
        except ChildFailedError as error:
            failed = error.get_first_failure()[1].exitcode
        except SignalException as error:
            failed = 128 + error.sigval
        return int(exit_file.read_text()) if exit_file.exists() else abs(failed)


def report_exit(code: int) -> None:
    """Tell the agent how the run ended; called by the first process as its last act."""
    path = os.environ.get(EXIT_FILE)
    if path and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(str(code))
