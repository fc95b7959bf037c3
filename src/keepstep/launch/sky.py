"""SkyPilot: the run as a managed job, which starts again on new machines when a cloud takes the old ones away."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from keepstep.core.errors import EXIT_STOPPED, HardwareError, UsageError
from keepstep.core.files import write_atomic
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.launch.environments import variables_for
from keepstep.launch.job import ENDED, Job, JobRecord, absolute, record_path, require_answer
from keepstep.launch.profile_kinds import SkyProfile
from keepstep.launch.quoting import shell_words, slug

CONFIG_FILE = "/tmp/keepstep-run.yaml"
_RUN = """\
printf '%s' "$KEEPSTEP_CONFIG" >{file}
export KEEPSTEP_HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1) PET_NODE_RANK=$SKYPILOT_NODE_RANK
export KEEPSTEP_ATTEMPT=$SKYPILOT_TASK_ID
{command}
"""


def task(job: Job, profile: SkyProfile) -> dict[str, Any]:
    """The job as a SkyPilot task. Values of secrets are not part of it: SkyPilot takes them from the environment."""
    nodes = f"{job.fewest_nodes or job.nodes}:{job.nodes}"
    processes, restarts = str(max(1, profile.gpus_per_node)), str(profile.max_restarts)
    launch = ["keepstep", "launch", "node", "--nodes", nodes, "--processes", processes, "--max-restarts", restarts]
    # Saved and stopped on request, as before a preemption: always start again. Other failures count.
    recovery = {"max_restarts_on_errors": profile.max_recoveries, "recover_on_exit_codes": [EXIT_STOPPED]}
    resources = {
        "infra": profile.infra,
        "accelerators": profile.accelerators,
        "use_spot": profile.use_spot or None,
        "image_id": profile.image and f"docker:{profile.image}",
        **profile.resources,
        "job_recovery": {**({"strategy": profile.strategy} if profile.strategy else {}), **recovery},
    }
    whole = {
        "name": slug(job.name),
        "resources": {name: value for name, value in resources.items() if value not in ("", None)},
        "num_nodes": job.nodes,
        "workdir": profile.workdir,
        "file_mounts": dict(profile.file_mounts),
        "setup": profile.setup,
        "run": _RUN.format(file=CONFIG_FILE, command=shell_words([*launch, "--", *job.words])),
        "envs": {
            **variables_for(profile.environment, profile.sharp, profile.variables),
            "KEEPSTEP_CONFIG": job.config_text,
        },
        "secrets": dict.fromkeys([RENDEZVOUS_SECRET, *profile.secrets]),
    }
    return {name: value for name, value in whole.items() if value not in ("", {})}


def render(job: Job, profile: SkyProfile) -> str:
    """The task's YAML file."""
    return yaml.safe_dump(task(job, profile), sort_keys=False, allow_unicode=True)


def submit(job: Job, profile: SkyProfile, profile_name: str) -> JobRecord:
    """Write the task next to the run, and pass it to `sky jobs launch`."""
    script = absolute(record_path(job.folder).parent) / "sky.yaml"
    write_atomic(script, render(job, profile))
    _launch(script, {name: str(here) for name, here in profile.secrets.items()})
    return job.submitted("sky", profile_name, slug(job.name), script=str(script))


def resume(record: JobRecord, exclude: Sequence[str] = ()) -> str:
    """Launch the same task again; the run resumes from its newest checkpoint. Returns the job's name."""
    if exclude:
        raise UsageError("SkyPilot chooses the machines: --exclude names none", f"keepstep resume {record.name}")
    require_answer(record, current := state(record))
    if current not in ENDED:
        raise UsageError(f"run {record.name} is {current}", f"keepstep stop {record.name} first")
    names = yaml.safe_load(Path(record.script).read_text())["secrets"]
    _launch(Path(record.script), {name: name for name in names if name != RENDEZVOUS_SECRET})
    return record.job_id


def stop(record: JobRecord, immediately: bool) -> None:
    """Cancel the job, which removes its machines."""
    if not immediately:
        message = "SkyPilot cannot ask a run to save: a cancelled job loses the work since its last checkpoint"
        raise UsageError(message, f"keepstep stop {record.name} --now cancels it")
    _sky(["cancel", "--yes", "--name", record.job_id])


def state(record: JobRecord) -> str:
    """waiting, running, ending, finished, stopped, failed or unreachable; empty where SkyPilot knows no such job."""
    try:
        jobs = json.loads(_sky(["queue", "--all", "--output", "json"]))
    except (HardwareError, ValueError):
        return "unreachable"
    found = [(job["job_id"], job["status"]) for job in jobs if job["job_name"] == record.job_id]
    status = max(found, default=(0, ""))[1]
    words = {"PENDING": "waiting", "SUBMITTED": "waiting", "STARTING": "waiting", "RECOVERING": "waiting"}
    words |= {"WINDING_DOWN": "ending", "CANCELLING": "ending", "SUCCEEDED": "finished", "CANCELLED": "stopped", "": ""}
    return words.get(status, "failed" if status.startswith("FAILED") else "running")


def log_text(record: JobRecord) -> str:
    """Everything the job has printed so far."""
    return _sky(["logs", "--no-follow", "--tail", "0", "--name", record.job_id])


def logs_command(record: JobRecord, follow: bool) -> list[str]:
    """The command that prints the job's log."""
    return [_program(), "jobs", "logs", "--follow" if follow else "--no-follow", "--name", record.job_id]


def _launch(script: Path, taken: Mapping[str, str]) -> None:
    """`--secret NAME` takes the value from the environment: a command line is readable by everybody."""
    if missing := [here for here in taken.values() if here not in os.environ]:
        raise UsageError(
            f"the profile's secrets need {', '.join(missing)}, which are not set here", "export them first"
        )
    values = {name: os.environ[here] for name, here in taken.items()} | {RENDEZVOUS_SECRET: secrets.token_hex(32)}
    options = [word for name in values for word in ("--secret", name)]
    _sky(["launch", "--yes", "--detach-run", *options, str(script)], values)


def _program() -> str:
    if found := shutil.which("sky"):
        return found
    raise UsageError(
        "there is no sky on this machine", "pip install 'skypilot[aws]' (or gcp, azure, kubernetes, nebius)"
    )


def _sky(words: Sequence[str], values: Mapping[str, str] | None = None) -> str:
    command, environment = [_program(), "jobs", *words], {**os.environ, **(values or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HardwareError(
            f"sky jobs {words[0]} failed: {(done.stderr or done.stdout).strip()}",
            "sky check tells which clouds can be used",
        )
    return done.stdout
