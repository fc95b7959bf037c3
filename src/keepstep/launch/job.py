"""What runs, where: the one description that every scheduler's text is rendered from."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.files import write_json

System = Literal["local", "slurm", "k8s"]


@dataclass(frozen=True)
class Target:
    """`--on`, read: which system, and which profile of it."""

    system: System
    profile: str = ""


def read_target(text: str) -> Target:
    """Read `local`, `slurm`, `slurm:PROFILE` or `k8s:PROFILE`."""
    match = re.fullmatch(r"(local|slurm|k8s)(?::(.+))?", text)
    if not match or (match[1] == "local" and match[2]):
        raise UsageError(
            f"--on is {text!r}, but it must be local, slurm:PROFILE or k8s:PROFILE", "--on slurm:azure-h100"
        )
    return Target(match[1], match[2] or "")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """One run as a job: the words after `keepstep` that every process gets, and how many of them."""

    name: str
    """The run's name."""
    words: tuple[str, ...]
    """`train run.yaml a.b=c`, or another verb that several processes share."""
    folder: Path
    """The run's folder: the job's script, record and logs lie below it."""
    nodes: int
    min_nodes: int = 0
    config_text: str = ""
    """The run.yaml, word for word: it travels with the job, so that a later edit does not change one that waits."""
    working_dir: Path = Path("/")
    """Relative paths in the configuration start here (Slurm)."""

    @property
    def node_range(self) -> str:
        """`4`, or `2:4` where fewer will do."""
        return f"{self.min_nodes}:{self.nodes}" if 0 < self.min_nodes < self.nodes else str(self.nodes)


@dataclass(frozen=True)
class JobRecord:
    """What `jobs`, `logs`, `stop` and `resume` need to know of a job that was submitted."""

    name: str
    system: System
    profile: str
    job_id: str
    """Slurm's job id, or the Helm release."""
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
    """Where a run's job record lies."""
    return folder / "job" / "job.json"


def stop_mark(job_folder: Path) -> Path:
    """A file that says that somebody wanted the job to stop, until it is submitted again."""
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
    try:
        return JobRecord(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}", "remove it; the run itself is not touched") from None


def unreachable(record: JobRecord) -> HardwareError:
    """For a job that may still run: a second one in its folder must not start."""
    return HardwareError(
        f"{record.system} cannot be asked whether run {record.name} still runs as {record.job_id}",
        "try again when the scheduler answers",
    )


def now() -> float:
    """The time a record carries."""
    return time.time()


def absolute(path: str | Path) -> Path:
    """A path as seen from any folder, with links left as they are (shared storage is often behind one)."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
