"""`keepstep train --on`: from a checked configuration to a job, then to its text, then to the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.config.check import check_layout
from keepstep.config.dump import written
from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, UsageError
from keepstep.launch import kubernetes, slurm
from keepstep.launch.job import Job, JobRecord, Target, absolute, all_records, read_target, unreachable
from keepstep.launch.kept import check_kept
from keepstep.launch.profiles import KubernetesProfile, SlurmProfile, load_profile

Profile = SlurmProfile | KubernetesProfile


def submit_run(
    where: str, path: Path | None, overrides: Sequence[str], config: RunConfig, nodes: int | None, dry_run: bool
) -> int:
    """Submit, or with `dry_run` print exactly what would be submitted."""
    target = read_target(where)
    if target.system == "local":
        raise UsageError("-N and --dry-run need a cluster", "--on slurm:PROFILE or --on k8s:PROFILE")
    profile = profile_of(target)
    job = training_job(target, profile, path, overrides, config, nodes)
    _check_layout(job, profile, config)
    _check_kept(job, profile, path, config)
    if dry_run:
        print(render(job, profile), end="")
        print("next: the same without --dry-run submits it", file=sys.stderr)
        return 0
    record = submit(job, profile, target)
    print(f"submitted {record.name} to {where} as {record.job_id} on {record.nodes} nodes")
    print(f"next: keepstep logs {record.name} --follow", file=sys.stderr)
    return 0


def profile_of(target: Target) -> Profile:
    """The profile that `--on` names."""
    if target.system == "slurm":
        return load_profile(SlurmProfile, target.profile)
    return load_profile(KubernetesProfile, target.profile)


def training_job(
    target: Target, profile: Profile, path: Path | None, overrides: Sequence[str], config: RunConfig, nodes: int | None
) -> Job:
    """The job that trains this configuration there."""
    count = profile.nodes if nodes is None else nodes
    if count < 1:
        raise UsageError(f"-N is {count}, but a job has at least one node", "-N 1")
    folder = Path(config.runs_dir) / config.name
    file = str(slurm.config_copy(folder)) if target.system == "slurm" else "/etc/keepstep/run.yaml"
    if isinstance(profile, KubernetesProfile):
        overrides = kubernetes.pod_overrides(overrides, config, profile)
    return Job(
        name=config.name,
        words=("train", file, *overrides),
        folder=folder,
        nodes=count,
        min_nodes=min(profile.min_nodes, count),
        config_text=path.read_text() if path else "{}\n",
        working_dir=Path.cwd(),
    )


def processes_per_node(profile: Profile) -> int:
    """Training processes on each node."""
    wanted = profile.processes_per_node if isinstance(profile, SlurmProfile) else 0
    return wanted or max(1, profile.gpus_per_node)


def _check_layout(job: Job, profile: Profile, config: RunConfig) -> None:
    # Told now rather than by every process an hour later, when the job leaves the queue.
    processes = processes_per_node(profile)
    check_layout(config, job.nodes * processes)
    for nodes in range(job.min_nodes or job.nodes, job.nodes):
        try:
            check_layout(config, nodes * processes)
        except ConfigError as error:
            # A run that lost a node starts again on what is left: that is what fewer nodes are allowed for.
            raise ConfigError(
                f"min_nodes is {job.min_nodes}, so that the run may have to do with {nodes} of {job.nodes} nodes, "
                f"where {error.message}",
                "reproducible=elastic runs on any number; or a global_batch for all of them, or min_nodes: 0",
            ) from None


def _check_kept(job: Job, profile: Profile, path: Path | None, config: RunConfig) -> None:
    if isinstance(profile, KubernetesProfile):
        # As the pod reads it: a folder may be written as ${runs_dir}/steps.
        inside = [f"name={written(job.name)}", f"runs_dir={written(kubernetes.runs_folder(profile))}", *job.words[2:]]
        volume = profile.mount_path
        remedy = f"a folder below {volume}; without checkpoint.folder steps are kept in the run's folder"
        # A pod starts in its image's own folder, wherever that is.
        check_kept(load_config(path, inside).config, [volume], "/image", remedy)
    elif profile.image:
        remedy = 'mounts: ["/scratch:/scratch"] in the profile, or a folder below one of them'
        check_kept(config, slurm.volumes(job, profile), str(job.working_dir), remedy)


def render(job: Job, profile: Profile) -> str:
    """The text that would be submitted."""
    if isinstance(profile, SlurmProfile):
        return slurm.render(job, profile)
    return kubernetes.render(job, profile)


def submit(job: Job, profile: Profile, target: Target) -> JobRecord:
    """Hand the job to its scheduler."""
    for record in all_records(absolute(job.folder).parent):
        if record.name != job.name:
            continue
        word = state(record)
        if word == "unreachable":
            raise unreachable(record)
        if word in ("waiting", "running", "ending"):
            raise UsageError(f"run {job.name} is {word} as {record.job_id}", "keepstep stop it, or name= another")
    if isinstance(profile, SlurmProfile):
        return slurm.submit(job, profile, target.profile)
    return kubernetes.submit(job, profile, target.profile)


def state(record: JobRecord) -> str:
    """In one word, the same for both systems."""
    return slurm.state(record) if record.system == "slurm" else kubernetes.state(record)


def stop(record: JobRecord, at_once: bool) -> None:
    """Ask the run to save and stop, or end it at once."""
    (slurm.stop if record.system == "slurm" else kubernetes.stop)(record, at_once)


def log_text(record: JobRecord) -> str:
    """All that the job has printed so far."""
    if record.system == "slurm":
        path = Path(record.log)
        return path.read_text(errors="replace") if path.exists() else ""
    return kubernetes.log_text(record)


def resume(record: JobRecord, exclude: Sequence[str]) -> JobRecord:
    """Submit what was submitted before; the run goes on from its newest checkpoint."""
    import dataclasses

    again = (slurm.resume if record.system == "slurm" else kubernetes.resume)(record, exclude)
    return dataclasses.replace(record, job_id=again)
