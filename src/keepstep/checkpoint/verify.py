"""Reading every byte of a step to see whether it is as it was written. No torch."""

from __future__ import annotations

from keepstep.checkpoint import commit, parity
from keepstep.checkpoint.manifest import StepFolder
from keepstep.checkpoint.retention import reading
from keepstep.checkpoint.store import Store
from keepstep.core.errors import CheckpointError


def step_problems(store: Store, step: StepFolder) -> list[str]:
    """Everything that is wrong with a step, each problem with the file's name; empty when it is whole."""
    with reading(store, step.name):
        try:
            manifest = commit.read_manifest(store, step)
        except CheckpointError as error:
            return [error.message]
        checks = [parity.file_problem(store, step.name, manifest, index) for index in range(len(manifest.files))]
        checks += [parity.parity_problem(store, step.name, manifest, group) for group in manifest.parity]
    return [problem for problem in checks if problem]
