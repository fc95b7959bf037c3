"""What runs where: the description that every scheduler's text is rendered from, and the record of a submission."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.errors import HardwareError, UsageError, malformed_as
from keepstep.core.files import write_json
from keepstep.core.messages import invalid_value

System = Literal["local", "slurm", "k8s", "ssh", "sky"]
WHERE = "local, slurm:PROFILE, k8s:PROFILE, sky:PROFILE or ssh:HOSTS"
ENDED = ("", "finished", "failed", "stopped")
"""States of a job that does not run any more; empty where the scheduler has forgotten it."""


@dataclass(frozen=True)
class Target:
    """The value of `--on`: a system, and a profile of it."""

    system: System
    profile: str = ""


def read_target(text: str) -> Target:
    """Read `local`, `slurm`, `slurm:PROFILE`, `k8s:PROFILE`, `sky:PROFILE` or `ssh:HOSTS`."""
    match = re.fullmatch(r"(local|slurm|k8s|ssh|sky)(?::(.+))?", text)
    if not match or (match[1] == "local" and match[2]):
        wrong = invalid_value("--on", text, f"must be {WHERE}")
        raise UsageError(wrong, "--on slurm:azure-h100")
    return Target(match[1], match[2] or "")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """One run as a job: the command that every process runs, and the number of nodes."""

    name: str
    """The run's name."""
    words: tuple[str, ...]
    """`train run.yaml a.b=c`, or another verb that several processes share."""
    folder: Path
    """The run's folder; the job's script, record and logs are below it."""
    nodes: int
    min_nodes: int = 0
    config_text: str = ""
    """The text of run.yaml. The job carries a copy, so that an edit does not change a job in the queue."""
    working_dir: Path = Path("/")
    """Relative paths in the configuration start here (Slurm, ssh)."""
    survives: bool = False
    """Whether the other nodes continue where one is lost."""

    @property
    def fewest_nodes(self) -> int:
        """Nodes that are enough to start; 0 where all are needed."""
        return self.min_nodes if 0 < self.min_nodes < self.nodes else 0

    def submitted(self, system: System, profile: str, job_id: str, **places: str) -> JobRecord:
        """The record of this job, which was submitted now."""
        return JobRecord(self.name, system, profile, job_id, self.nodes, time.time(), **places)


@dataclass(frozen=True)
class JobRecord:
    """What `jobs`, `logs`, `stop` and `resume` need to know about a submitted job."""

    name: str
    system: System
    profile: str
    job_id: str
    """Slurm's job id, the Helm release, or the attempt (ssh)."""
    nodes: int
    submitted: float
    log: str = ""
    """Log file (Slurm)."""
    script: str = ""
    """The script or values that were submitted."""
    namespace: str = ""
    context: str = ""

    def save(self, folder: Path) -> None:
        """Write the record into the run's folder."""
        write_json(record_path(folder), asdict(self))


def record_path(folder: Path) -> Path:
    """The file of a run's job record."""
    return folder / "job" / "job.json"


def stop_mark(job_folder: Path) -> Path:
    """A file that exists from a stop request until the job is submitted again."""
    return job_folder / "stop"


def load_record(runs_dir: Path, name: str) -> JobRecord:
    """The record of a submitted run."""
    path = record_path(runs_dir / name)
    if not path.is_file():
        known = [record.name for record in all_records(runs_dir)]
        raise UsageError(
            f"no job was submitted for a run {name!r} in {runs_dir}",
            f"submitted: {', '.join(known)}" if known else "keepstep train run.yaml --on slurm:PROFILE submits one",
        )
    return _read(path)


def all_records(runs_dir: Path) -> list[JobRecord]:
    """Every submitted run, the newest first."""
    records = [_read(path) for path in runs_dir.glob("*/job/job.json")]
    return sorted(records, key=lambda record: -record.submitted)


def _read(path: Path) -> JobRecord:
    with malformed_as(UsageError, f"{path} is damaged", "remove it; the run itself is not touched"):
        return JobRecord(**json.loads(path.read_text()))


def require_answer(record: JobRecord, state: str) -> None:
    """Raise for a job that may still be running: no second job may start in its folder."""
    if state == "unreachable":
        raise HardwareError(
            f"{record.system} does not answer whether run {record.name} is still running as {record.job_id}",
            "try again when the scheduler answers",
        )


def absolute(path: str | Path) -> Path:
    """An absolute path that keeps its links: shared storage is often behind one."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
