"""How an agent treats its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.config.schema import ResilienceConfig

EventSink = Callable[..., None]
"""Called as on_event(kind, **facts) for each fault, restart and resize."""


@dataclass(frozen=True)
class AgentSettings:
    """What an agent knows about its run."""

    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    storage_wait_s: float = 600.0
    """How long to wait for room when a full disk ends the processes."""
    run_folder: Path | None = None
    """The folder by which other processes of this machine find the agent."""
    logs: Path | None = None
    """For the stacks of processes that hang."""
    on_event: EventSink = lambda *_, **__: None
    is_over: Callable[[], bool] = lambda: False
    """Whether the run has finished since this agent started, perhaps on other nodes."""
    replica_size: int = 1
    """Processes of each replica, where replicas outlive each other."""
