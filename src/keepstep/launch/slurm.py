"""Slurm: render the batch script, submit it, query it, stop it, and submit it again."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from keepstep.core.errors import EXIT_DONE, EXIT_HARDWARE, EXIT_STOPPED, HardwareError, UsageError
from keepstep.core.files import write_atomic
from keepstep.core.ranks import node_number
from keepstep.core.verbosity import debug
from keepstep.launch.environments import variables_for
from keepstep.launch.job import ENDED, Job, JobRecord, absolute, record_path, require_answer, stop_mark
from keepstep.launch.profile_kinds import SlurmProfile
from keepstep.launch.quoting import sbatch_value, shell_word, shell_words, slug
from keepstep.resilience.signals import SHUTDOWN_S, SHUTDOWN_VARIABLE


def render(job: Job, profile: SlurmProfile) -> str:
    """The whole batch script: header, settings, and the body that all jobs share."""
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
    fewest = job.fewest_nodes
    yield option("nodes", f"{fewest}-{job.nodes}" if fewest else str(job.nodes))
    if not fewest:
        # With a node range this would let Slurm start only the smallest number of tasks; srun sets it instead.
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
    # In a cloud the nodes of a job boot one after the other.
    yield "#SBATCH --wait-all-nodes=1"
    yield option("chdir", str(job.working_dir))
    log = str(log_path(job.folder))
    if "\\" in log:
        raise UsageError(
            f"Slurm cannot write to {log!r}: it drops backslashes from names",
            "set runs_dir to a folder without backslashes in its path",
        )
    # In sbatch, % starts a pattern.
    yield option("output", log.replace("%", "%%"))
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue"
    if job.survives:
        # A lost node does not end the job, unless it is the first one, on which this script runs.
        yield "#SBATCH --no-kill"
    # Without `B:` the signal goes to the job steps, which are the training processes.
    yield f"#SBATCH --signal=USR1@{profile.warn_before_end_s}"
    for further in profile.options:
        name, separator, value = further.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UsageError(f"options: {further!r} is not an sbatch option", "--constraint=h100")
        yield option(name, value) if separator else f"#SBATCH --{name}"


def _settings(job: Job, profile: SlurmProfile) -> Iterator[str]:
    # The agent must give a save all the time that Slurm leaves for it.
    yield f"export {SHUTDOWN_VARIABLE}={max(int(SHUTDOWN_S), profile.warn_before_end_s)}"
    for name, value in variables_for(profile.environment, profile.sharp, profile.variables).items():
        yield f"export {name}={shell_word(value)}"
    for name, path in profile.secrets.items():
        # Read on the node, so that no script, record or log contains the value.
        yield f"{name}=$(<{shell_word(path)}) || exit 2; export {name}"
    processes = profile.processes_per_node or max(1, profile.gpus_per_node)
    yield f"export KEEPSTEP_JOB_FOLDER={shell_word(str(absolute(record_path(job.folder).parent)))}"
    yield f"KEEPSTEP_PROCESSES={processes}"
    if job.fewest_nodes:
        yield f"KEEPSTEP_MIN_NODES={job.fewest_nodes}"
    yield f"KEEPSTEP_RESTARTS={profile.max_restarts}"
    yield f"KEEPSTEP_REQUEUES={profile.max_requeues}"
    yield f"KEEPSTEP_LAUNCH=({shell_words(_command(profile))})"
    yield from _container(job, profile)
    if job.survives:
        yield "KEEPSTEP_SRUN+=(--no-kill --kill-on-bad-exit=0)"
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
    # No --container-name: a named container stays on the node, and the next job with that name gets it, whatever image
    # it asks for.
    options = ["--no-container-mount-home", f"--container-workdir={job.working_dir}"]
    options.append(f"--container-mounts={','.join(mounts)}")
    yield f"KEEPSTEP_SRUN=({shell_words(options)} --container-image={image})"


def _own_mounts(job: Job) -> list[str]:
    """The working directory and the run's folder have the same path inside the container as outside."""
    return list(dict.fromkeys(str(path) for path in (job.working_dir, absolute(job.folder))))


def volumes(job: Job, profile: SlurmProfile) -> list[str]:
    """Folders of the container that outlive it."""
    # SOURCE:TARGET:FLAGS, or one path for both.
    mounts = [mount.split(":") for given in profile.mounts for mount in given.split(",")]
    return [*(parts[min(1, len(parts) - 1)] for parts in mounts), *_own_mounts(job)]


# A copy counts as the image only where size and modification time are equal: "newer" is wrong after a rollback to an
# older image, or where the clocks of node and storage differ. One job per node copies at a time, always to the same
# temporary name, so that interrupted copies do not pile up.
_STAGE = """\
same() { [ -e "$2" ] && [ "$(stat -Lc %s.%Y -- "$1")" = "$(stat -c %s.%Y -- "$2")" ]; }
mkdir -p -- "${2%/*}" && { same "$1" "$2" || {
  flock 9 && { same "$1" "$2" ||
    { cp -L --preserve=timestamps --remove-destination -- "$1" "$2.part" && mv -- "$2.part" "$2"; }; }
} 9<"${2%/*}"; }"""


def _staged(profile: SlurmProfile) -> str:
    """The path of a node's copy of the image; images in different folders may have the same name."""
    folder, name = profile.stage_image.rstrip("/"), profile.image.rpartition("/")[2]
    return f"{folder}/{hashlib.sha256(profile.image.encode()).hexdigest()[:8]}-{name}"


def submit(job: Job, profile: SlurmProfile, profile_name: str) -> JobRecord:
    """Write the script next to the run and pass it to sbatch."""
    script = absolute(record_path(job.folder).parent) / "job.sbatch"
    write_atomic(script, render(job, profile))
    if job.config_text:
        write_atomic(config_copy(job.folder), job.config_text)
    log_path(job.folder).parent.mkdir(parents=True, exist_ok=True)
    log = str(log_path(job.folder))
    return job.submitted("slurm", profile_name, _sbatch(script), log=log, script=str(script))


def resume(record: JobRecord, exclude: Sequence[str] = ()) -> str:
    """Submit the same script again, without the nodes named; returns the new job id."""
    current = state(record)
    require_answer(record, current)
    if current not in ENDED:
        raise UsageError(f"run {record.name} is {current} as job {record.job_id}", f"keepstep stop {record.name} first")
    script, options = Path(record.script), list[str]()
    if exclude:
        # sbatch's option replaces the script's, so nodes that the profile excludes must be named again.
        before = re.findall(r'^#SBATCH --exclude="?([^"\n]*)', script.read_text(), re.MULTILINE)[:1]
        options = [f"--exclude={','.join(dict.fromkeys([*exclude, *before]))}"]
    return _sbatch(script, options)


def stop(record: JobRecord, immediately: bool) -> None:
    """Ask the run to save and stop; `immediately` cancels it without a save."""
    current = state(record)
    if current in ENDED:
        raise UsageError(
            f"run {record.name} is not running: {current or 'Slurm has forgotten it'}", "keepstep jobs lists all"
        )
    mark = stop_mark(Path(record.script).parent)
    asked_before = mark.exists()
    # The mark first: a node that is just starting sees it, a running one gets the signal, and nothing is requeued.
    mark.touch()
    try:
        waiting = _run(["squeue", "-h", "-j", record.job_id, "-o", "%T"]).strip() in (*_QUEUED, "CONFIGURING")
        _run(["scancel", *([] if immediately or waiting else ["--signal=USR1"]), record.job_id])
    except HardwareError:
        if not asked_before:
            # The user sees that this failed, so the run must not stop at its next time limit because of the mark.
            mark.unlink(missing_ok=True)
        raise


def log_text(record: JobRecord) -> str:
    """Everything the job has printed so far."""
    path = Path(record.log)
    return path.read_text(errors="replace") if path.exists() else ""


_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
"""States of a job without processes that may start, by itself or when somebody releases it."""
_FAILED = (
    "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED",
    "RECONFIG_FAIL", "REVOKED",
)  # fmt: skip
"""Final states."""
_STATES = {
    **dict.fromkeys(("CONFIGURING", "SUSPENDED", "STOPPED", *_QUEUED), "waiting"),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), "ending"),
    "COMPLETED": "finished",
    "CANCELLED": "stopped",
    "": "",
}


def state(record: JobRecord) -> str:
    """waiting, running, ending, finished, stopped, failed or unreachable; empty where Slurm has forgotten the job."""
    try:
        known = _run(["scontrol", "-o", "show", "job", record.job_id])
    except HardwareError as error:
        # A controller that is busy or down has forgotten nothing.
        return "" if "Invalid job id" in error.message else "unreachable"
    words = dict(re.findall(r"(?:^|\s)(JobState|ExitCode)=(\S+)", known))
    job_state = words.get("JobState", "")
    if job_state in _FAILED:
        return "stopped" if words.get("ExitCode", "").startswith("75:") else "failed"
    # Any other state is that of a running job: no second job may start in its folder.
    return _STATES.get(job_state, "running")


def record_exit(job_folder: Path, code: int) -> int:
    """Tell the batch shell what srun cannot: that the run saved or is done, or that this node failed.

    Returns this node's code.
    """
    try:
        if code == EXIT_STOPPED:
            (job_folder / "saved").touch()
            # With another code srun would end the other nodes, which may still be closing their files.
            return EXIT_DONE
        if code == EXIT_DONE and node_number(os.environ) == 0:
            (job_folder / "done").touch()
        if code == EXIT_HARDWARE:
            with (job_folder / "failed-nodes").open("a") as file:
                file.write(os.environ.get("SLURMD_NODENAME", "") + "\n")
    except OSError as error:
        # A full or read-only disk: the exit code alone still says how the run ended.
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return code


def idle_nodes(profile: SlurmProfile) -> list[str]:
    """Nodes of the profile's partition that could start a job now."""
    where = ["-p", profile.partition] if profile.partition else []
    answer = _run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N %P", *where])
    default = [line.split()[0] for line in answer.splitlines() if where or line.endswith("*")]
    # A profile may list nodes as n[1-3,7].
    names = _run(["scontrol", "show", "hostnames", ",".join(profile.exclude)]).split() if profile.exclude else []
    return [name for name in dict.fromkeys(default) if name not in names]


def _sbatch(script: Path, options: Sequence[str] = ()) -> str:
    stop_mark(script.parent).unlink(missing_ok=True)
    return _run(["sbatch", "--parsable", *options, str(script)]).strip().partition(";")[0]


def _run(command: Sequence[str]) -> str:
    debug(shlex.join(command))
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        remedy = "run this on a Slurm login node, or use --dry-run"
        raise UsageError(f"there is no {command[0]} on this machine", remedy) from None
    except subprocess.CalledProcessError as error:
        raise HardwareError(f"{command[0]} failed: {error.stderr.strip()}", "sinfo shows the cluster's state") from None
