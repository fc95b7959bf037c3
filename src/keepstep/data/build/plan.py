"""What a build will do, written down before it starts, and the same for everyone who works on it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from keepstep.core.errors import DataError, UsageError
from keepstep.core.files import write_atomic, write_once
from keepstep.data.filters import FilterOptions
from keepstep.data.records import RecordOptions
from keepstep.data.sources import BUILD_STATE, Piece, content_version, cut_tasks, find_files

STATE = BUILD_STATE
TOKENIZER = "tokenizer.json"
DATASET = "dataset.json"
REJECTS = "rejects.jsonl"

_SMALLEST_TASK = 16 << 20
_LARGEST_TASK = 1 << 30
_TASKS_WANTED = 1024


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides the bytes of the output. Workers are not among it."""

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
    """MDS: join documents and cut every this many tokens, dropping each task's tail; 0 keeps one document a sample."""
    dtype: Literal["auto", "uint16", "int32"] = "auto"
    """Type of a token on disk. auto is what the format's own tools would choose."""
    limit: int = 0
    """Stop after this many samples (MDS with concat) or documents; 0 takes all. A limited build is one task."""
    task_bytes: int = 0
    """Input in one task; 0 chooses by the size of the whole."""
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
    """What each input holds, as far as a few places of it tell."""

    def to_json(self) -> str:
        """The same text for the same plan, whoever writes it."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan that was written down."""
        raw = json.loads(text)
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
    """Look at the inputs and cut the work."""
    _check(options)
    files = find_files(options.inputs)
    total = sum(max(0, file.size_bytes) for file in files)
    size = options.task_bytes or min(_LARGEST_TASK, max(_SMALLEST_TASK, total // _TASKS_WANTED))
    if options.limit:
        size = max(1, total) + 1
    tasks = [cut_tasks([file], 1 << 62)[0] for file in files] if options.task_per_file else cut_tasks(files, size)
    return Plan(options, tasks, total, {file.path: content_version(file) for file in files})


def _check(options: BuildOptions) -> None:
    if options.concat and options.format != "mds":
        raise UsageError(
            "--concat belongs to --format mds", ".bin/.idx keeps documents; rows are cut when they are loaded"
        )
    if options.limit and options.task_per_file:
        raise UsageError("--limit makes a build one task, --task-per-file one for each file", "drop one of them")
    if options.concat < 0 or options.limit < 0 or options.task_bytes < 0:
        raise UsageError("--concat, --limit and --task-bytes must not be negative", "leave them out for their defaults")
    if not 0 <= options.max_reject_share <= 1:
        raise UsageError(
            f"--max-reject-share is {options.max_reject_share}, but it is a share between 0 and 1", "0.01 is usual"
        )


def settle_plan(folder: Path, plan: Plan, tokenizer: Path) -> Plan:
    """Write the plan down, or make sure that the folder was started with the same one; the plan to follow."""
    path = folder / STATE / "plan.json"
    if not path.exists():
        # Of two builds that begin at the same moment one is the folder's, and the other goes on from here like any.
        write_once(path, plan.to_json())
    known = Plan.from_json(path.read_text())
    # On the Hub an address may mean a newer commit by now; the one that the build began with is still there.
    moved_on = known.options == plan.options and all(name.startswith("hf://") for name in plan.options.inputs)
    # A plan of an earlier keepstep says nothing about what its inputs held.
    as_known = plan if known.versions else replace(plan, versions={})
    if known != as_known and not moved_on:
        difference = _difference(json.loads(known.to_json()), json.loads(as_known.to_json()))
        raise DataError(
            f"{folder} was started with other inputs or options: {difference}",
            "give the same inputs and options to go on, or another --out" + _or_begin_anew(folder, known),
        )
    # Whoever goes on tokenises with the folder's own copy, and it stays with the data.
    copy = folder / TOKENIZER
    if not copy.is_file() or sha256_file(copy) != known.options.tokenizer_sha256:
        write_atomic(copy, tokenizer.read_bytes())
    return known


def _or_begin_anew(folder: Path, known: Plan) -> str:
    """Where a first try came to nothing, a mistyped option say, its folder need not be kept."""
    tasks = range(len(known.tasks))
    if len(open_tasks(folder, tasks)) < len(tasks):
        return ""
    return f"; none of its tasks is done: if nobody is at it, rm -r {shlex.quote(str(folder))} and start again"


def _difference(known: Any, wanted: Any, at: str = "") -> str:
    """The first place where two plans differ, in words."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in sorted({*known, *wanted}, key=lambda key: (key == "tasks", key)):
            if known.get(key) == wanted.get(key):
                continue
            if at == "versions":
                return f"{key} holds something else now"
            return _difference(known.get(key), wanted.get(key), f"{at}.{key}".lstrip("."))
    if isinstance(known, list) and isinstance(wanted, list):
        return f"{at} differ" if len(known) == len(wanted) else f"{len(known)} {at} then, {len(wanted)} now"
    return f"{at} was {known!r}, now it is {wanted!r}"


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is a build that has begun and is not whole."""
    return has_plan(folder) and not (folder / DATASET).is_file()


def has_plan(folder: Path) -> bool:
    """Whether a build has begun in a folder."""
    return (folder / STATE / "plan.json").is_file()


def unfinished_error(where: str) -> DataError:
    """What to say to whoever wants the data of such a build."""
    return DataError(f"{where} is a build that has not finished", "start its keepstep data build command again")


def marker_path(folder: Path, task: int) -> Path:
    """Where a task says that it is done."""
    return folder / STATE / f"task-{task:05d}.json"


def read_marker(folder: Path, task: int) -> dict[str, Any] | None:
    """What a finished task wrote about itself; None when it is not finished."""
    try:
        found: dict[str, Any] = json.loads(marker_path(folder, task).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{marker_path(folder, task)} is damaged", "delete it and run the build again") from error
    return found


def open_tasks(folder: Path, tasks: Sequence[int]) -> list[int]:
    """Those of `tasks` that are not done."""
    return [task for task in tasks if not marker_path(folder, task).exists()]
