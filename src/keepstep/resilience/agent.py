"""The processes of a run on this node: torchrun's own agent, with exit codes and errors that mean something."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from keepstep.core.errors import EXIT_FAILED, EXIT_STOPPED
from keepstep.core.nodes import NodeGroup

EXIT_FILE = "KEEPSTEP_EXIT_FILE"
"""Environment variable: where a node's first process writes its exit code, because a signalled agent reports none."""

# A step and a save must fit between a stop request and the agent's kill; torch's own 30 s are too short for that.
_SHUTDOWN_TIMEOUT_S = 540


def run_processes(arguments: Sequence[str], processes: int, group: NodeGroup | None = None) -> int:
    """Start `python -m keepstep ARGUMENTS` as `processes` ranks of this node and return the run's exit code.

    Without a `group` this node is the only one.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Workers print their own error; the agent's account of it would bury that under a page of tables.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # With a shared store, keys of an earlier attempt leak into the next one and restarts race.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    # Operators set these for a node where torch means a process; the agent sets its own for each worker.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    group = group or NodeGroup()
    timeouts = {"read_timeout": group.join_timeout_s, "timeout": group.join_timeout_s}
    config = LaunchConfig(
        min_nodes=group.min_nodes,
        max_nodes=group.max_nodes,
        nproc_per_node=processes,
        run_id=group.run_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=group.endpoint,
        rdzv_configs=timeouts if group.is_host is None else {**timeouts, "is_host": group.is_host},
        max_restarts=group.max_restarts,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    with tempfile.TemporaryDirectory(prefix="keepstep-") as scratch:
        exit_file = Path(scratch) / "exit"
        os.environ[EXIT_FILE] = str(exit_file)
        failed = EXIT_FAILED
        try:
            elastic_launch(config, sys.executable)("-m", "keepstep", *arguments)
            return EXIT_STOPPED if _reported(exit_file) == EXIT_STOPPED else 0
        except ChildFailedError as error:
            failed = error.get_first_failure()[1].exitcode
        except SignalException as error:
            failed = 128 + error.sigval
        reported = _reported(exit_file)
        return abs(failed) if reported is None else reported


def _reported(exit_file: Path) -> int | None:
    return int(exit_file.read_text()) if exit_file.exists() else None


def report_exit(code: int) -> int:
    """Tell the agent how the run ended, as a worker's last act, and return the code to leave with.

    A saved stop leaves with 0: on a node that got no signal itself the agent would take 75 for a crash and restart.
    """
    path = os.environ.get(EXIT_FILE)
    if path is None:
        return code
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(str(code))
    return 0 if code == EXIT_STOPPED else code
