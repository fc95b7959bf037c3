"""Slurm: render the batch script, submit it, and ask, stop or start again what was submitted."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.files import write_atomic
from keepstep.launch.environments import variables_for
from keepstep.launch.job import Job, JobRecord, absolute, now, record_path, stop_mark, unreachable
from keepstep.launch.profiles import SlurmProfile
from keepstep.launch.quoting import sbatch_value, shell_word, shell_words, slug
from keepstep.resilience.signals import SHUTDOWN_S, SHUTDOWN_VARIABLE


def render(job: Job, profile: SlurmProfile) -> str:
    """The whole batch script: header, what to run, and the body that all jobs share."""
    body = (resources.files("keepstep.launch") / "batch.sh").read_text()
    lines = ["#!/bin/bash", *_header(job, profile), "", *_settings(job, profile), "", body]
    return "\n".join(lines)


def log_path(folder: Path) -> Path:
    """One log for all attempts of a run."""
    return absolute(folder) / "logs" / "slurm.out"


def config_copy(folder: Path) -> Path:
    """The run.yaml that the job reads."""
    return absolute(record_path(folder).parent) / "run.yaml"


def _header(job: Job, profile: SlurmProfile) -> Iterator[str]:
    def option(name: str, value: str) -> str:
        return f"#SBATCH --{name}={sbatch_value(name, value)}"

    yield option("job-name", slug(job.name))
    fewest = job.min_nodes if 0 < job.min_nodes < job.nodes else 0
    yield option("nodes", f"{fewest}-{job.nodes}" if fewest else str(job.nodes))
    if not fewest:
        # With a range it would make Slurm content with as many tasks, and so nodes, as the fewest: srun says it itself.
        yield option("ntasks-per-node", "1")
    if profile.gpus_per_node:
        yield option("gpus-per-node", str(profile.gpus_per_node))
    if profile.cpus_per_node:
        yield option("cpus-per-task", str(profile.cpus_per_node))
    named = {
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "reservation": profile.reservation,
        "time": profile.time_limit,
        "mem": profile.memory,
        "exclude": ",".join(profile.exclude),
    }
    for name, value in named.items():
        if value:
            yield option(name, value)
    if profile.exclusive:
        yield "#SBATCH --exclusive"
    yield option("chdir", str(job.working_dir))
    log = str(log_path(job.folder))
    if "\\" in log:
        raise UsageError(f"Slurm cannot write to {log!r}: it drops backslashes from names", "runs_dir= another folder")
    # sbatch reads % as the start of a pattern.
    yield option("output", log.replace("%", "%%"))
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue"
    # Without B: the signal goes to the steps, where the training processes are.
    yield f"#SBATCH --signal=USR1@{profile.warn_before_end_s}"
    for further in profile.options:
        name, separator, value = further.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UsageError(f"options: {further!r} is not an sbatch option", "--constraint=h100")
        yield option(name, value) if separator else f"#SBATCH --{name}"


def _settings(job: Job, profile: SlurmProfile) -> Iterator[str]:
    # All the time that Slurm leaves for a save is there to be used: the agent must not end it before.
    yield f"export {SHUTDOWN_VARIABLE}={max(int(SHUTDOWN_S), profile.warn_before_end_s)}"
    for name, value in variables_for(profile.environment, profile.sharp, profile.variables).items():
        yield f"export {name}={shell_word(value)}"
    for name, path in profile.secrets.items():
        # Read on the node, so that the value is in no script, record or log.
        yield f"{name}=$(<{shell_word(path)}) || exit 2; export {name}"
    processes = profile.processes_per_node or max(1, profile.gpus_per_node)
    yield f"export KEEPSTEP_JOB_FOLDER={shell_word(str(absolute(record_path(job.folder).parent)))}"
    yield f"KEEPSTEP_PROCESSES={processes}"
    if 0 < job.min_nodes < job.nodes:
        yield f"KEEPSTEP_MIN_NODES={job.min_nodes}"
    yield f"KEEPSTEP_RESTARTS={profile.max_restarts}"
    yield f"KEEPSTEP_REQUEUES={profile.max_requeues}"
    yield f"KEEPSTEP_LAUNCH=({shell_words(_command(profile))})"
    yield from _container(job, profile)
    yield "KEEPSTEP_UPDATES=()"
    yield f"KEEPSTEP_WORDS=({shell_words(job.words)})"


def _command(profile: SlurmProfile) -> Sequence[str]:
    if profile.image:
        return ("keepstep",)
    if profile.venv:
        return (f"{profile.venv.rstrip('/')}/bin/keepstep",)
    return (sys.executable, "-m", "keepstep")


def _container(job: Job, profile: SlurmProfile) -> Iterator[str]:
    if not profile.image:
        yield "KEEPSTEP_SRUN=()"
        return
    image = shell_word(profile.image)
    if profile.stage_image:
        yield f"image={image}; staged={shell_word(_staged(profile))}"
        yield f'srun --ntasks-per-node=1 bash -c {shell_word(_STAGE)} stage "$image" "$staged" || exit 5'
        image = '"$staged"'
    mounts = [*profile.mounts, *(f"{path}:{path}" for path in _own_mounts(job))]
    # No --container-name: what has a name stays on the node, and the next job of that name gets it, whatever its image.
    options = ["--no-container-mount-home", f"--container-workdir={job.working_dir}"]
    options.append(f"--container-mounts={','.join(mounts)}")
    yield f"KEEPSTEP_SRUN=({shell_words(options)} --container-image={image})"


def _own_mounts(job: Job) -> list[str]:
    """The run's folder and the folder that relative paths start from are inside what they are outside."""
    return list(dict.fromkeys(str(path) for path in (job.working_dir, absolute(job.folder))))


def volumes(job: Job, profile: SlurmProfile) -> list[str]:
    """Folders of the container that outlive it."""
    # SOURCE:TARGET:FLAGS, or one path for both.
    mounts = [mount.split(":") for given in profile.mounts for mount in given.split(",")]
    return [*(parts[min(1, len(parts) - 1)] for parts in mounts), *_own_mounts(job)]


# A copy is taken for the image only where it has its size and its time: which of the two is newer says nothing where an
# older image came back, or where the clocks of node and storage differ. One job of a node copies at a time, always by
# way of the same name, so that copies that were cut short do not pile up.
_STAGE = """\
same() { [ -e "$2" ] && [ "$(stat -Lc %s.%Y -- "$1")" = "$(stat -c %s.%Y -- "$2")" ]; }
mkdir -p -- "${2%/*}" && { same "$1" "$2" || {
  flock 9 && { same "$1" "$2" ||
    { cp -L --preserve=timestamps --remove-destination -- "$1" "$2.part" && mv -- "$2.part" "$2"; }; }
} 9<"${2%/*}"; }"""


def _staged(profile: SlurmProfile) -> str:
    """Where a node keeps its copy of the image: two images may have the same name in different folders."""
    folder, name = profile.stage_image.rstrip("/"), profile.image.rpartition("/")[2]
    return f"{folder}/{hashlib.sha256(profile.image.encode()).hexdigest()[:8]}-{name}"


def submit(job: Job, profile: SlurmProfile, profile_name: str) -> JobRecord:
    """Write the script beside the run and hand it to sbatch."""
    script = absolute(record_path(job.folder).parent) / "job.sbatch"
    write_atomic(script, render(job, profile))
    if job.config_text:
        write_atomic(config_copy(job.folder), job.config_text)
    log_path(job.folder).parent.mkdir(parents=True, exist_ok=True)
    record = JobRecord(
        name=job.name,
        system="slurm",
        profile=profile_name,
        job_id=_sbatch(script),
        nodes=job.nodes,
        submitted=now(),
        log=str(log_path(job.folder)),
        script=str(script),
    )
    record.save(job.folder)
    return record


def resume(record: JobRecord, exclude: Sequence[str] = ()) -> str:
    """Submit the same script again, without the nodes named; returns the new job id."""
    current = state(record)
    if current == "unreachable":
        raise unreachable(record)
    if current not in ("", "finished", "failed", "stopped"):
        raise UsageError(f"run {record.name} is {current} as job {record.job_id}", "keepstep stop it first")
    # sbatch's option replaces the script's, so nodes that are never to be used must be named again.
    left_out = [*exclude, *_excluded(Path(record.script))] if exclude else []
    return _sbatch(Path(record.script), [f"--exclude={','.join(dict.fromkeys(left_out))}"] if left_out else [])


def _excluded(script: Path) -> list[str]:
    """Nodes that a script does without."""
    found = re.search(r'^#SBATCH --exclude="?([^"\n]*)', script.read_text(), re.MULTILINE)
    return [found[1]] if found else []


def stop(record: JobRecord, at_once: bool) -> None:
    """Ask the run to save and stop; `at_once` cancels it without a save."""
    current = state(record)
    if current in ("", "finished", "failed", "stopped"):
        raise UsageError(f"run {record.name} does not run: {current or 'Slurm has forgotten it'}", "keepstep jobs")
    mark = stop_mark(Path(record.script).parent)
    asked_before = mark.exists()
    # Left first: a node that starts only now sees it, one that runs gets the signal, and nothing is requeued.
    mark.touch()
    try:
        waiting = _run(["squeue", "-h", "-j", record.job_id, "-o", "%T"]).strip() in (*_QUEUED, "CONFIGURING")
        _run(["scancel", *([] if at_once or waiting else ["--signal=USR1"]), record.job_id])
    except HardwareError:
        if not asked_before:
            # Who is told that this failed must not find the run ended at its next time limit all the same.
            mark.unlink(missing_ok=True)
        raise


_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
"""States of a job that has no process anywhere and may start, by itself or when somebody releases it."""
_FAILED = (
    "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED",
    "RECONFIG_FAIL", "REVOKED",
)  # fmt: skip
"""States that a job does not leave."""


def state(record: JobRecord) -> str:
    """waiting, running, ending, finished, stopped, failed, unreachable, or empty where Slurm has forgotten the job."""
    try:
        known = _run(["scontrol", "-o", "show", "job", record.job_id])
    except HardwareError as error:
        # A controller that is busy or away has forgotten nothing.
        return "" if "Invalid job id" in error.message else "unreachable"
    words = dict(re.findall(r"(?:^|\s)(JobState|ExitCode)=(\S+)", known))
    match words.get("JobState", ""):
        case "":
            return ""
        case "CONFIGURING" | "SUSPENDED" | "STOPPED":
            return "waiting"
        case state if state in _QUEUED:
            return "waiting"
        case "COMPLETING" | "STAGE_OUT":
            return "ending"
        case "COMPLETED":
            return "finished"
        case "CANCELLED":
            return "stopped"
        case state if state in _FAILED:
            return "stopped" if words.get("ExitCode", "").startswith("75:") else "failed"
        case _:
            # Running, or something that Slurm may do to a job that runs: a second one in its folder must not start.
            return "running"


def idle_nodes(profile: SlurmProfile) -> list[str]:
    """Nodes of the profile's partition that could start a job now."""
    where = ["-p", profile.partition] if profile.partition else []
    answer = _run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N %P", *where])
    default = [line.split()[0] for line in answer.splitlines() if where or line.endswith("*")]
    # A profile may name nodes as n[1-3,7].
    names = _run(["scontrol", "show", "hostnames", ",".join(profile.exclude)]).split() if profile.exclude else []
    return [name for name in dict.fromkeys(default) if name not in names]


def _sbatch(script: Path, options: Sequence[str] = ()) -> str:
    stop_mark(script.parent).unlink(missing_ok=True)
    return _run(["sbatch", "--parsable", *options, str(script)]).strip().partition(";")[0]


def _run(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise _no_slurm(command[0]) from None
    except subprocess.CalledProcessError as error:
        raise HardwareError(f"{command[0]} failed: {error.stderr.strip()}", "sinfo shows the cluster's state") from None


def _no_slurm(program: str) -> UsageError:
    return UsageError(f"there is no {program} on this machine", "run this on a Slurm login node, or use --dry-run")
