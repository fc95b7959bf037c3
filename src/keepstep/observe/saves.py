"""Which step of a run is on disk, and which saves were skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.step_folders import newest_saved_step
from keepstep.observe.history import History
from keepstep.observe.run_folder import Record, number, whole


@dataclass(frozen=True)
class Saves:
    """The newest committed checkpoint of a run, and the saves that failed."""

    step: int = -1
    """Step of the newest checkpoint on disk; -1 if there is none."""
    time: float = math.nan
    recorded_step: int = -1
    """The largest step that the run recorded as committed. Its checkpoint may have been removed since."""
    skipped: tuple[int, ...] = ()
    """Steps whose save failed and was not repeated."""
    at_end: bool = True
    """Whether the run saves its last step."""


def find_saves(history: History) -> Saves:
    """Read the markers on disk where this machine sees them, else the events of the run."""
    commits = [event for event in history.events if event.get("kind") == "checkpoint_committed"]
    steps = {whole(event.get("step"), -1) for event in commits}
    failed = {whole(event.get("step"), -1) for event in history.events if _is_failed_save(event)}
    config = history.config_text()
    folder = _checkpoint_folder(config, history.folder.checkpoints)
    step, time = (newest_saved_step(folder) if folder is not None else None) or (-1, math.nan)
    if folder is None and commits:
        step, time = whole(commits[-1].get("step"), -1), number(commits[-1].get("time"))
    return Saves(
        step,
        time,
        recorded_step=max(steps, default=-1),
        skipped=tuple(sorted(failed - steps - {step})),
        at_end=_setting(config, "at_end") != "false",
    )


def _is_failed_save(event: Record) -> bool:
    kind = event.get("kind")
    return kind == "save_skipped" or (kind == "warning" and event.get("reason") == "checkpoint_failed")


def _checkpoint_folder(config: str, default: Path) -> Path | None:
    """The local folder of the checkpoints; None if it is remote, relative to an unknown folder, or not mounted here."""
    named = _setting(config, "folder")
    if named and not Path(named).is_absolute():
        return None
    folder = Path(named) if named else default
    return folder if folder.is_dir() else None


def _setting(config: str, name: str) -> str:
    """A value of the `checkpoint` section, by lines: a list of many runs has no time to parse YAML."""
    inside = False
    for line in config.splitlines():
        if not line.startswith(" "):
            inside = line.startswith("checkpoint:")
        elif inside and line.strip().startswith(f"{name}:"):
            return line.partition(":")[2].partition(" #")[0].strip().strip("'\"")
    return ""
