"""What a process finds on a node: variables that a machine type needs (data), and volumes that outlive its container.

A container's own disk is lost with the container: a run must save to a volume that is mounted into it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources

from keepstep.config.parse import load_own_yaml
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, KeepstepError

VOLUMES_VARIABLE = "KEEPSTEP_VOLUMES"
"""In a container: the folders that outlive it, separated by colons, which no mounted path can contain."""


@cache
def all_environments() -> Mapping[str, Mapping[str, str]]:
    """Every profile by name."""
    text = (resources.files("keepstep.launch") / "environments.yaml").read_text()
    loaded: dict[str, dict[str, str]] = load_own_yaml(text)
    return loaded


def variables_for(environment: str, sharp: bool, further: Mapping[str, object]) -> dict[str, str]:
    """Variables to export; later ones win: elastic, the machine's, SHARP's, the user's own."""
    merged: dict[str, str] = dict(all_environments()["elastic"])
    if environment != "none":
        merged |= all_environments()[environment]
    if sharp:
        merged |= all_environments()["sharp"]
    own = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in further.items()}
    return merged | own


def missing_parts(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Message and hint for what the variables name and this node or container lacks: NCCL only gets slower."""
    topology = variables.get("NCCL_TOPO_FILE", "")
    if topology and not os.path.isfile(topology):  # noqa: PTH113 - text of a variable
        yield f"NCCL_TOPO_FILE is {topology}, but there is no such file: NCCL guesses the topology", "mount the file"
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnccl-net.so')"]
    if variables.get("NCCL_COLLNET_ENABLE") == "1" and subprocess.run(load, stderr=subprocess.DEVNULL).returncode:
        hint = "install nccl-rdma-sharp-plugins and SHARP's library, and add their folders to LD_LIBRARY_PATH"
        yield "SHARP is on, but NCCL's plugin libnccl-net.so cannot be loaded: NCCL works without SHARP", hint


def is_on_volume(folder: str, volumes: Sequence[str], working_dir: str) -> bool:
    """Whether a folder of a container is on one of its volumes."""
    path = os.path.normpath(os.path.join(working_dir, folder))  # noqa: PTH118 - a path of another machine
    return any(f"{path}/".startswith(os.path.normpath(volume).rstrip("/") + "/") for volume in volumes)


def check_volumes(config: RunConfig, volumes: Sequence[str], working_dir: str, remedy: str) -> None:
    """Raise where checkpoints or the run's folder would be lost with the container, and visible to one node only."""
    run_folder = os.path.join(config.runs_dir, config.name)  # noqa: PTH118 - a path of another machine
    saved = {"the run's folder": run_folder, "checkpoint.folder": config.checkpoint.folder}
    problems = [
        KeepstepError(
            f"{what} is {folder}, which is on no volume of the container ({', '.join(volumes)}): "
            "what is saved there is lost when the container ends",
            remedy,
        )
        for what, folder in saved.items()
        if folder and not is_on_volume(folder, volumes, working_dir)
    ]
    if problems:
        raise ConfigError(problems)
