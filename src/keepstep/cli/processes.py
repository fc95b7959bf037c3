"""Starting the processes of a verb under an agent, and telling the run's folder what the agent sees."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.nodes import NodeGroup, node_number

TRAINING = ("keepstep.cli.train", "keepstep.train.run")
"""Modules that a training process needs, imported ahead of it."""


def start_processes(
    words: Sequence[str], processes: int, group: NodeGroup | None = None, config: RunConfig | None = None
) -> int:
    """Run `keepstep WORDS` as this many processes here; `config` is the run's, where the verb trains one."""
    from keepstep.cli.main import main
    from keepstep.resilience.agent import run_processes
    from keepstep.resilience.workers import Task

    if config is None:
        return run_processes(Task(main, words), processes, group)
    from keepstep.observe.folder import JsonLines, RunFolder
    from keepstep.observe.logs import recording

    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    events = JsonLines(folder.events)

    def tell(kind: str, **facts: Any) -> None:
        try:
            events.append({"time": time.time(), "kind": kind, **facts})
        except OSError as error:
            # A full disk is often the very fault that is to be told: the restart matters more than a line about it.
            print(f"warning: {kind} is not written down: {folder.events}: {error}", file=sys.stderr, flush=True)
        told = facts.get("what") or ", ".join(f"{name} {value}" for name, value in facts.items())
        logger.log(logging.ERROR if kind == "fault" else logging.INFO, "%s: %s", kind, told)

    task = Task(
        main,
        words,
        TRAINING + (("tensorboard.summary.writer.event_file_writer",) if config.observe.tensorboard else ()),
    )
    with recording(folder.logs, "agent", node_number(os.environ)) as logger:
        return run_processes(task, processes, group, config.resilience, tell, folder.logs)
