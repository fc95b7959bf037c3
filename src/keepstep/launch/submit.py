"""From a configuration, or a measurement, to a job, to its text, to the scheduler; and what becomes of the job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep.config.dump import written
from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, HardwareError, KeepstepError, UsageError
from keepstep.core.verbosity import progress
from keepstep.launch import kubernetes, sky, slurm, ssh
from keepstep.launch.environments import check_volumes
from keepstep.launch.job import (
    ENDED,
    Job,
    JobRecord,
    Target,
    absolute,
    all_records,
    read_target,
    record_path,
    require_answer,
)
from keepstep.launch.profile_kinds import KubernetesProfile, SkyProfile, SlurmProfile, SshProfile
from keepstep.launch.profiles import PROFILES, AnyProfile, load_hosts, load_profile
from keepstep.plan.calibrate import calibrate, shipped_runs
from keepstep.plan.choose import choose_batch, differences, not_given, plan_or_choose
from keepstep.plan.cluster import GIB, Cluster, find_cluster, read_profiles
from keepstep.plan.goodput import known_recoveries
from keepstep.plan.plan import Assumptions, Plan

REPORT_MARK = "keepstep-report "
"""The job's first process prints its report behind this mark, in one line."""


@dataclass(frozen=True)
class RunRequest:
    """A run to submit, as the user asked for it."""

    path: Path | None
    overrides: Sequence[str]
    config: RunConfig
    nodes: int | None = None
    """None: the profile's number."""
    not_asked_for: frozenset[str] = frozenset()
    """Fields of `overrides` that the command set, and not the user."""


def submit_run(where: str, request: RunRequest, dry_run: bool) -> int:
    """Submit the run; with `dry_run`, print exactly what would be submitted."""
    target = read_target(where)
    path, overrides, nodes = request.path, request.overrides, request.nodes
    if target.system == "local":
        raise UsageError("-N and --dry-run need a cluster", "--on slurm:PROFILE, k8s:PROFILE, sky:PROFILE or ssh:HOSTS")
    origins = load_config(path, overrides).origins
    if origins["data.path"].kind == origins["data.blend"].kind == "default":
        raise ConfigError("the run names no data set", "data=/data/my-copy-c4/train; data=demo is for a first try")
    profile = profile_of(target)
    config, chosen = _with_choice(request, profile)
    job = training_job(target, profile, path, [*overrides, *chosen], config, nodes)
    _check_layout(job, profile, config)
    _check_volumes(job, profile, path, config)
    if dry_run:
        print(render(job, profile), end="")
        progress("next: the same without --dry-run submits it")
        return 0
    record = submit(job, profile, target)
    print(f"submitted {record.name} to {where} as {record.job_id} on {record.nodes} nodes", flush=True)
    if target.system == "ssh":
        # There is no queue: the run has started. Ctrl-C saves and stops it, as on this machine.
        return ssh.follow(record, attached=True)
    progress(f"next: keepstep logs {record.name} --follow")
    return 0


def profile_of(target: Target) -> AnyProfile:
    """The profile that `--on` names."""
    if target.system == "ssh":
        return load_hosts(target.profile)
    return load_profile(PROFILES[target.system], target.profile)


def training_job(
    target: Target,
    profile: AnyProfile,
    path: Path | None,
    overrides: Sequence[str],
    config: RunConfig,
    nodes: int | None,
) -> Job:
    """The job that trains this configuration there."""
    count = profile.nodes if nodes is None else nodes
    if count < 1:
        raise UsageError(f"-N is {count}, but a job has at least one node", "-N 1")
    folder = Path(config.runs_dir) / config.name
    files = {"slurm": str(slurm.config_copy(folder)), "ssh": str(record_path(folder).with_name("run.yaml"))}
    files["sky"] = sky.CONFIG_FILE
    file = files.get(target.system, "/etc/keepstep/run.yaml")
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
        survives=config.resilience.survive and count > 1,
    )


def _processes_per_node(profile: AnyProfile) -> int:
    wanted = profile.processes_per_node if isinstance(profile, SlurmProfile | SshProfile) else 0
    return wanted or max(1, profile.gpus_per_node)


def _with_choice(request: RunRequest, profile: AnyProfile) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with degrees and a batch for the job's processes, where nobody gave those that suit them."""
    config = request.config
    open_fields = not_given(load_config(request.path, request.overrides)) | request.not_asked_for
    count, processes = max(1, profile.nodes if request.nodes is None else request.nodes), _processes_per_node(profile)
    least = min(profile.min_nodes or count, count)
    world_sizes = [each * processes for each in range(least, count + 1)]
    cluster = _cluster(profile, count, config)
    chosen: tuple[str, ...] = ()
    if cluster is not None:
        plan = _planned(config, open_fields, cluster)
        if plan.chosen:  # else the run itself chooses what is `auto`
            config, chosen = plan.config, plan.chosen
    if not _suits(config, world_sizes):
        batch = choose_batch(config, open_fields, world_sizes)
        if batch is not None:  # else _check_layout raises the error with its remedy
            config, chosen = batch.config, differences(request.config, batch.config)
    if chosen:
        where = f"{count} × {processes} processes" if least == count else f"{least} to {count} × {processes} processes"
        print(f"chosen: {' '.join(chosen)}  (not given; for {where})", file=sys.stderr)
    return config, chosen


def _suits(config: RunConfig, world_sizes: Sequence[int]) -> bool:
    with suppress(ConfigError):
        return all(check_layout(config, size) for size in world_sizes)
    return False


def _cluster(profile: AnyProfile, nodes: int, config: RunConfig) -> Cluster | None:
    """The profile's machines as the planner knows them; None where they, or the shape of the model, are not known."""
    start = config.finetune.start_from
    if not isinstance(profile, SlurmProfile | KubernetesProfile) or not profile.cluster:
        return None
    if _processes_per_node(profile) != profile.gpus_per_node:
        return None
    if start.startswith("/") and not Path(start).exists():
        return None  # on the volume of the pods
    return replace(find_cluster(profile.cluster, read_profiles()), nodes=nodes, gpus_per_node=profile.gpus_per_node)


def _planned(config: RunConfig, open_fields: frozenset[str], cluster: Cluster) -> Plan:
    """The plan of `keepstep plan --cluster`, with what nobody gave chosen; a warning where it does not fit."""
    assumptions = Assumptions(known_recoveries()["keepstep"], calibrate(shipped_runs(), cluster))
    plan = plan_or_choose(config, open_fields, cluster, assumptions)
    if not plan.fits_device:
        needed, there = plan.memory.needed / GIB, cluster.gpu.memory_gib
        print(
            f"warning: the run needs about {needed:.0f} GiB on each GPU, and {cluster.gpu.name} has {there:.0f}\n"
            f" hint: keepstep plan with the same words and --cluster {cluster.name}:{cluster.nodes} names what fits",
            file=sys.stderr,
        )
    return plan


def _check_layout(job: Job, profile: AnyProfile, config: RunConfig) -> None:
    # Checked now: every process would report it, but hours later, when the job leaves the queue.
    processes = _processes_per_node(profile)
    check_layout(config, job.nodes * processes)
    for nodes in range(job.min_nodes or job.nodes, job.nodes):
        try:
            check_layout(config, nodes * processes)
        except ConfigError as error:
            # A run that lost a node restarts on the rest: the purpose of min_nodes.
            raise ConfigError(
                f"min_nodes is {job.min_nodes}, so the run may continue on {nodes} of {job.nodes} nodes, "
                f"where {error.message}",
                "reproducible=elastic runs on any number; or a global_batch for all of them, or min_nodes: 0",
            ) from None


def _check_volumes(job: Job, profile: AnyProfile, path: Path | None, config: RunConfig) -> None:
    if isinstance(profile, KubernetesProfile):
        # As the pod reads it: checkpoint.folder may be ${runs_dir}/steps.
        inside = [f"name={written(job.name)}", f"runs_dir={written(kubernetes.runs_folder(profile))}", *job.words[2:]]
        volume = profile.mount_path
        remedy = f"a folder below {volume}; without checkpoint.folder steps are kept in the run's folder"
        # A pod's working directory is a folder of its image.
        check_volumes(load_config(path, inside).config, [volume], "/image", remedy)
    elif isinstance(profile, SkyProfile):
        mounts = [path for path, what in profile.file_mounts.items() if isinstance(what, dict)]
        remedy = 'file_mounts: {/runs: {source: "s3://my-bucket/runs", mode: MOUNT}} in the profile, and runs_dir=/runs'
        check_volumes(config, mounts, "/image", remedy)
    elif isinstance(profile, SlurmProfile) and profile.image:
        remedy = 'mounts: ["/scratch:/scratch"] in the profile, or a folder below one of them'
        check_volumes(config, slurm.volumes(job, profile), str(job.working_dir), remedy)


def render(job: Job, profile: AnyProfile) -> str:
    """The text that would be submitted."""
    text: str = _engine_of(profile).render(job, profile)
    return text


def _engine_of(profile: AnyProfile) -> Any:
    return next(_ENGINES[system] for system, kind in PROFILES.items() if isinstance(profile, kind))


def submit(job: Job, profile: AnyProfile, target: Target) -> JobRecord:
    """Hand the job to its scheduler."""
    for record in all_records(absolute(job.folder).parent):
        if record.name != job.name:
            continue
        word = state(record)
        require_answer(record, word)
        if word in ("waiting", "running", "ending"):
            raise UsageError(
                f"run {job.name} is {word} as {record.job_id}",
                f"keepstep stop {job.name}, or choose another name with name=NAME",
            )
    submitted: JobRecord = _engine_of(profile).submit(job, profile, target.profile)
    submitted.save(job.folder)
    return submitted


_ENGINES: dict[str, Any] = {"slurm": slurm, "k8s": kubernetes, "ssh": ssh, "sky": sky}


def show_log(record: JobRecord, follow: bool) -> int:
    """Print the log of a job whose engine keeps it; returns an exit code."""
    if record.system == "ssh":
        if follow:
            return ssh.follow(record, attached=False)
        print(ssh.log_text(record), end="")
        return 0
    command = (kubernetes if record.system == "k8s" else sky).logs_command(record, follow)
    return subprocess.run(command, check=False).returncode


def state(record: JobRecord) -> str:
    """The job's state in one word, the same words for all systems."""
    word: str = _ENGINES[record.system].state(record)
    return word


def stop(record: JobRecord, immediately: bool) -> None:
    """Ask the run to save and stop, or end it immediately without a save."""
    _ENGINES[record.system].stop(record, immediately)


def log_text(record: JobRecord) -> str:
    """Everything the job has printed so far."""
    text: str = _ENGINES[record.system].log_text(record)
    return text


def resume(record: JobRecord, exclude: Sequence[str]) -> JobRecord:
    """Submit the same job again; the run resumes from its newest checkpoint."""
    return replace(record, job_id=_ENGINES[record.system].resume(record, exclude))


@dataclass(frozen=True)
class ReportJob:
    """A job that is ready to submit, and the nodes that must take part in it, where they are known."""

    job: Job
    profile: AnyProfile
    target: Target
    expected: list[str] = field(default_factory=list)


def report_job(
    target: Target, words: Sequence[str], runs_dir: Path, nodes: int | None, *, ask_cluster: bool = True
) -> ReportJob:
    """The job that runs `keepstep WORDS` on `nodes` nodes; on all idle ones of Slurm where no number is given."""
    # A failed measurement is an answer: it is not tried again.
    profile = replace(profile_of(target), max_restarts=0, min_nodes=0)
    expected: list[str] = []
    if isinstance(profile, SlurmProfile):
        profile = replace(profile, max_requeues=0)
        if nodes is None and ask_cluster:
            expected = slurm.idle_nodes(profile)
            nodes = len(expected)
            if not nodes:
                raise UsageError("no node is idle", "sinfo shows why; -N asks for a number and waits")
    elif isinstance(profile, KubernetesProfile):
        profile = replace(profile, backoff_limit=0, tensorboard=False)
    name = f"{words[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    count = profile.nodes if nodes is None else nodes
    job = Job(name, tuple(words), runs_dir / f".{words[0]}" / name, count, working_dir=Path.cwd())
    return ReportJob(job, profile, target, expected)


def run_report_job(chosen: ReportJob, timeout_s: int) -> list[dict[str, Any]]:
    """Submit the job and return the reports of all its processes."""
    record = submit(chosen.job, chosen.profile, chosen.target)
    progress(f"measuring {chosen.job.nodes} nodes as job {record.job_id}")
    try:
        reports = _wait_for_report(record, timeout_s)
    except KeyboardInterrupt:
        # Nobody waits for the job any more, and it would take every idle node when it starts.
        with suppress(KeepstepError):
            stop(record, immediately=True)
        raise
    if record.system == "k8s":
        # A Helm release stays installed after its job has ended.
        with suppress(KeepstepError):
            stop(record, immediately=False)
    return reports


def _wait_for_report(record: JobRecord, timeout_s: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + timeout_s
    while True:
        over = state(record) in ENDED
        text = log_text(record)
        line, line_end, _ = text.partition(REPORT_MARK)[2].partition("\n")
        # Without a line end the log was read while the report was being written.
        if line_end:
            reports: list[dict[str, Any]] = json.loads(line)
            return reports
        if over or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if not over:
        stop(record, immediately=True)
    why = "it ended without a report" if over else f"it was not done after {timeout_s} s"
    raise HardwareError(
        f"job {record.job_id}: {why}\n{text[-2000:]}", f"-N {max(1, record.nodes // 2)} finds the half at fault"
    )
