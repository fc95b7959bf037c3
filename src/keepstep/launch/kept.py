"""A container's own disk goes with it: what a run saves must lie on a volume that is mounted into it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, KeepstepError

VOLUMES_VARIABLE = "KEEPSTEP_VOLUMES"
"""In a container: the folders that outlive it, separated by colons, which no mounted path can hold."""


def is_kept(folder: str, volumes: Sequence[str], working_dir: str) -> bool:
    """Whether a folder of a container lies on one of its volumes."""
    place = os.path.normpath(os.path.join(working_dir, folder))  # noqa: PTH118 - a path of another machine
    return any(f"{place}/".startswith(os.path.normpath(volume).rstrip("/") + "/") for volume in volumes)


def check_kept(config: RunConfig, volumes: Sequence[str], working_dir: str, remedy: str) -> None:
    """Raise where steps or the run's folder would be gone with the container, and be seen by one node alone."""
    run_folder = os.path.join(config.runs_dir, config.name)  # noqa: PTH118 - a path of another machine
    saved = {"the run's folder": run_folder, "checkpoint.folder": config.checkpoint.folder}
    problems = [
        KeepstepError(
            f"{what} is {folder}, which is on no volume of the container ({', '.join(volumes)}): "
            "what is saved there is lost when the container ends",
            remedy,
        )
        for what, folder in saved.items()
        if folder and not is_kept(folder, volumes, working_dir)
    ]
    if problems:
        raise ConfigError(problems)
