"""The plan of a build: written before it starts, and the same for every process that works on it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from keepstep.core.errors import DataError, UsageError, malformed_as
from keepstep.core.files import write_atomic, write_once
from keepstep.data.formats.build_folder import PLAN, STATE, TOKENIZER
from keepstep.data.prepare.filters import FilterOptions
from keepstep.data.prepare.records import RecordOptions
from keepstep.data.prepare.sources import Piece, content_version, find_files, split_tasks

_SMALLEST_TASK = 16 << 20
_LARGEST_TASK = 1 << 30
_TASKS_WANTED = 1024


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides the bytes of the output. The number of workers does not."""

    inputs: tuple[str, ...]
    tokenizer_sha256: str
    format: Literal["megatron", "mds"] = "megatron"
    name: str = "part"
    records: RecordOptions = field(default_factory=RecordOptions)
    filters: FilterOptions = field(default_factory=FilterOptions)
    bos: str = ""
    """Text of the token put before each document; empty for none."""
    eos: str = ""
    """Text of the token put after each document; empty for none."""
    concat: int = 0
    """MDS: concatenate documents into samples of this many tokens and drop each task's rest; 0: one document each."""
    dtype: Literal["auto", "uint16", "int32"] = "auto"
    """Type of a token on disk. auto is the choice of the format's own tools."""
    limit: int = 0
    """Stop after this many samples (MDS with concat) or documents; 0 for all. A limited build is one task."""
    task_bytes: int = 0
    """Input bytes in one task; 0 chooses by the size of all inputs."""
    task_per_file: bool = False
    """Each input file is one task, so that N files become N pairs."""
    max_reject_share: float = 0.01
    """Stop when more than this share of a task's records is bad."""


@dataclass(frozen=True)
class Plan:
    """A build's tasks and its options."""

    options: BuildOptions
    tasks: list[list[Piece]]
    input_bytes: int
    versions: dict[str, str] = field(default_factory=dict)
    """The content version of each input."""

    def to_json(self) -> str:
        """The same text for the same plan on every machine."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan of a build's folder."""
        path = folder / STATE / PLAN
        with malformed_as(DataError, f"{path} is damaged", "copy it again, or build into another folder"):
            raw = json.loads(path.read_bytes())
            options = raw["options"]
            nested = {
                "inputs": tuple(options["inputs"]),
                "records": RecordOptions(**options["records"]),
                "filters": FilterOptions(**options["filters"]),
            }
            tasks = [[Piece(**piece) for piece in task] for task in raw["tasks"]]
            return cls(BuildOptions(**{**options, **nested}), tasks, raw["input_bytes"], raw.get("versions", {}))


def sha256_file(path: Path) -> str:
    """Checksum of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_plan(options: BuildOptions) -> Plan:
    """Find the inputs and split the work into tasks."""
    _check(options)
    files = find_files(options.inputs)
    total = sum(max(0, file.size_bytes) for file in files)
    size = options.task_bytes or min(_LARGEST_TASK, max(_SMALLEST_TASK, total // _TASKS_WANTED))
    if options.limit:
        size = max(1, total) + 1
    tasks = [split_tasks([file], 1 << 62)[0] for file in files] if options.task_per_file else split_tasks(files, size)
    return Plan(options, tasks, total, {file.path: content_version(file) for file in files})


def _check(options: BuildOptions) -> None:
    if options.concat and options.format != "mds":
        raise UsageError(
            "--concat needs --format mds", ".bin/.idx stores documents; they become rows when they are loaded"
        )
    if options.limit and options.task_per_file:
        raise UsageError(
            "--limit and --task-per-file exclude each other: with --limit a build is one task", "drop one of them"
        )
    if options.concat < 0 or options.limit < 0 or options.task_bytes < 0:
        raise UsageError("--concat, --limit and --task-bytes must not be negative", "leave them out for their defaults")
    if not 0 <= options.max_reject_share <= 1:
        raise UsageError(
            f"--max-reject-share is {options.max_reject_share}, but it is a share between 0 and 1", "0.01 is usual"
        )


def load_or_create_plan(folder: Path, plan: Plan, tokenizer: Path) -> Plan:
    """Write the plan, or check that the folder was started with the same one; returns the folder's plan."""
    path = folder / STATE / PLAN
    if not path.exists():
        # Of two builds that start at the same moment, one writes the plan and the other continues with it.
        write_once(path, plan.to_json())
    known = Plan.read(folder)
    # On the Hub an address may mean a newer commit by now; the commit of the plan is still available.
    newer_commit = known.options == plan.options and all(name.startswith("hf://") for name in plan.options.inputs)
    # A plan of an earlier version has no content versions of its inputs.
    comparable = plan if known.versions else replace(plan, versions={})
    if known != comparable and not newer_commit:
        difference = _difference(json.loads(known.to_json()), json.loads(comparable.to_json()))
        raise DataError(
            f"{folder} was started with other inputs or options: {difference}",
            "give the same inputs and options to continue, or another --out" + _restart_hint(folder, known),
        )
    # A resumed build tokenises with the folder's own copy, which stays with the data.
    copy = folder / TOKENIZER
    if not copy.is_file() or sha256_file(copy) != known.options.tokenizer_sha256:
        write_atomic(copy, tokenizer.read_bytes())
    return known


def _restart_hint(folder: Path, known: Plan) -> str:
    """How to drop a first attempt that finished no task, for example because of a mistyped option."""
    tasks = range(len(known.tasks))
    if len(remaining_tasks(folder, tasks)) < len(tasks):
        return ""
    return f"; none of its tasks is done: if no process works on it, rm -r {shlex.quote(str(folder))} and start again"


def _difference(known: Any, wanted: Any, at: str = "") -> str:
    """The first difference between two plans, in words."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in sorted({*known, *wanted}, key=lambda key: (key == "tasks", key)):
            if known.get(key) == wanted.get(key):
                continue
            if at == "versions":
                return f"{key} has changed"
            return _difference(known.get(key), wanted.get(key), f"{at}.{key}".lstrip("."))
    if isinstance(known, list) and isinstance(wanted, list):
        return f"{at} differ" if len(known) == len(wanted) else f"{len(known)} {at} then, {len(wanted)} now"
    return f"{at} was {known!r}, now it is {wanted!r}"


def marker_path(folder: Path, task: int) -> Path:
    """The marker of a finished task."""
    return folder / STATE / f"task-{task:05d}.json"


def read_marker(folder: Path, task: int) -> dict[str, Any] | None:
    """The facts of a finished task; None while it is not finished."""
    path = marker_path(folder, task)
    try:
        with malformed_as(DataError, f"{path} is damaged", "delete it and run the build again"):
            found: dict[str, Any] = json.loads(path.read_bytes())
            counts = [found.get("largest_id", 0), *(found[key] for key in ("task", "documents", "samples", "tokens"))]
            counts += [*found["rejects"].values(), *found["dropped"].values(), *(f["bytes"] for f in found["files"])]
            names = [(one["name"] + one["sha256"]).lower() for one in found["files"]]
            shards = found["shards"] if any(".mds" in name for name in names) else []
            _ = sum(counts), [{**one} for one in (*found["reject_samples"], *shards)]  # fails for other kinds of values
    except FileNotFoundError:
        return None
    return found


def remaining_tasks(folder: Path, tasks: Sequence[int]) -> list[int]:
    """Those of `tasks` that are not done."""
    return [task for task in tasks if not marker_path(folder, task).exists()]
