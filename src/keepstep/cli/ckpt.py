"""`keepstep ckpt`: look at checkpoints, check them, mend them, tidy up, convert and compare."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, UsageError
from keepstep.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from keepstep.checkpoint.manifest import StepFolder
    from keepstep.checkpoint.store import Store

_ACTIONS = {
    "ls": "PLACE: committed steps, newest first, and what was never committed",
    "du": "PLACE: bytes by step",
    "show": "PLACE: what one step holds (default: the newest)",
    "verify": "PLACE: read and check every byte of one step, or of all",
    "repair": "PLACE: rebuild damaged files from parity",
    "gc": "PLACE: delete what --keep does not keep, and what was never committed; only shows it without --yes",
    "convert": "SOURCE TARGET: write a checkpoint in another form (--to)",
    "diff": "STEP STEP: which tensors differ",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do and where."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            *(f"  {name:<8} {text}" for name, text in _ACTIONS.items()),
            "",
            "PLACE: the folder of a run, of its checkpoints or of one step; a path or an s3://, gs:// or abfs:// URL.",
        ]
    )
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do, see below")
    parser.add_argument("places", nargs="+", metavar="PLACE", help="where, see below")
    parser.add_argument("--step", type=int, help="show, verify, repair: this step; convert: what a foreign SOURCE is")
    parser.add_argument("--tensors", action="store_true", help="show: list every tensor")
    parser.add_argument("--keep", type=int, default=3, help="gc: newest commits to keep (default 3)")
    parser.add_argument("--keep-every", type=int, default=0, help="gc: keep steps divisible by this as well")
    parser.add_argument("--keep-best", type=int, default=0, help="gc: keep this many with the lowest loss as well")
    parser.add_argument("--yes", action="store_true", help="gc: do it")
    parser.add_argument(
        "--to", choices=("sharded", "full", "safetensors", "dcp", "hf"), help="convert: the form to write"
    )
    parser.add_argument(
        "--config", type=Path, help="convert: the model's shape (a run.yaml) where SOURCE does not say it"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="convert: precision of weights, from or to other trainers (default: fp32 in our forms, else as they are)",
    )
    parser.add_argument("--shards", type=int, default=1, help="convert --to sharded: data files to write")
    parser.add_argument("--parity", action="store_true", help="convert: add a parity file")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Do one of the actions."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _ls,
        "du": _du,
        "show": _show,
        "verify": _verify,
        "repair": _repair,
        "gc": _gc,
        "convert": _convert,
        "diff": _diff,
    }
    wanted = 2 if args.action in ("convert", "diff") else 1
    if len(args.places) != wanted:
        raise UsageError(
            f"keepstep ckpt {args.action} takes {wanted} place{'s' * (wanted > 1)}, not {len(args.places)}",
            f"keepstep ckpt {args.action} {_ACTIONS[args.action].partition(':')[0]}",
        )
    try:
        return actions[args.action](args)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        hint = "see that the place can be reached, and that this user or these credentials may use it"
        raise CheckpointError(f"keepstep ckpt {args.action}: {error}", hint) from error


def _open(place: str) -> tuple[Store, str | None]:
    """The store behind a run's folder, a checkpoints folder or a step's folder, and the step's name if it is one."""
    from keepstep.checkpoint.manifest import parse_folder_name
    from keepstep.checkpoint.store import open_store

    parent, _, name = place.rstrip("/").rpartition("/")
    if parse_folder_name(name) is not None:
        steps = open_store(parent or ".")
        if name not in steps.names():
            raise CheckpointError(f"{place} does not exist", f"keepstep ckpt ls {parent or '.'} lists those that do")
        return steps, name
    store = open_store(place)
    names = store.names()
    if "checkpoints" in names:
        return open_store(f"{place.rstrip('/')}/checkpoints"), None
    if not names:
        raise CheckpointError(f"{place} does not exist or is empty", "give a run's folder or its checkpoints folder")
    return store, None


def _steps(store: Store, damages: list[CheckpointError]) -> list[StepFolder]:
    from keepstep.checkpoint.commit import committed_steps

    return committed_steps(store, damages.append)


def _choose(place: str, step: int | None = None) -> tuple[Store, StepFolder]:
    """One step: the one named, or the newest."""
    from keepstep.checkpoint.commit import read_step

    store, name = _open(place)
    if name is not None:
        try:
            return store, read_step(store, name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{place} is not committed: it has no marker") from error
    damages: list[CheckpointError] = []
    steps = [found for found in _steps(store, damages) if step is None or found.step == step]
    if not steps:
        if damages:
            raise damages[0]
        raise CheckpointError(
            f"{store.locate()} holds no committed step" + (f" {step}" if step is not None else ""),
            f"keepstep ckpt ls {place}",
        )
    return store, steps[0]


def _print(args: argparse.Namespace, answer: Any, lines: list[str]) -> None:
    from keepstep.observe.view import jsonable

    print(json.dumps(jsonable(answer), indent=2, allow_nan=False) if args.json else "\n".join(lines))


def _ls(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.commit import leftovers
    from keepstep.checkpoint.retention import being_written

    store, _ = _open(args.places[0])
    damages: list[CheckpointError] = []
    steps = _steps(store, damages)
    unfinished = list(leftovers(store))
    answer = {
        "place": store.locate(),
        "steps": [
            {
                "folder": step.name,
                "step": step.step,
                "time": step.marker.time,
                "bytes": step.marker.data_bytes,
                "world_size": step.marker.world_size,
                "latest": number == 0,
            }
            for number, step in enumerate(steps)
        ],
        "damaged": [error.message for error in damages],
        "uncommitted": unfinished,
    }
    now = time.time()
    lines = [
        f"{step.name:<20} {format_bytes(step.marker.data_bytes):>10}  {step.marker.world_size:>4} ranks  "
        f"{format_seconds(max(now - step.marker.time, 0))} ago{'  latest' if number == 0 else ''}"
        for number, step in enumerate(steps)
    ]
    lines += [f"damaged: {error.message}" for error in damages]
    lines += [
        f"{name:<20} {'being written' if being_written(store, name) else 'never committed'}" for name in unfinished
    ]
    if not lines:
        lines = ["no steps"]
    lines.append(f"next: keepstep ckpt verify {args.places[0]}")
    _print(args, answer, lines)
    return EXIT_DONE


def _du(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.manifest import MARKER, parse_folder_name

    store, only = _open(args.places[0])
    sizes = {}
    for name in [only] if only else store.names():
        if parse_folder_name(name) is not None:
            files = store.names(name)
            sizes[name] = {"bytes": sum(_size(store, f"{name}/{file}") for file in files), "committed": MARKER in files}
    total = sum(int(entry["bytes"]) for entry in sizes.values())
    free = store.free_bytes()
    answer = {"place": store.locate(), "steps": sizes, "total_bytes": total, "free_bytes": free}
    lines = [
        f"{format_bytes(entry['bytes']):>10}  {name}{'' if entry['committed'] else '  never committed'}"
        for name, entry in sizes.items()
    ]
    lines.append(f"{format_bytes(total):>10}  in all" + (f", {format_bytes(free)} free" if free is not None else ""))
    lines.append(f"next: keepstep ckpt gc {args.places[0]}")
    _print(args, answer, lines)
    return EXIT_DONE


def _size(store: Store, name: str) -> int:
    """Bytes of a file; none where a run that is under way has just removed it."""
    try:
        return store.size(name)
    except FileNotFoundError:
        return 0


def _show(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.commit import read_manifest

    store, step = _choose(args.places[0], args.step)
    manifest = read_manifest(store, step)
    sections: dict[str, dict[str, int]] = {}
    for name, tensor in manifest.tensors.items():
        section = sections.setdefault(name.partition(".")[0], {"tensors": 0, "bytes": 0})
        section["tensors"] += 1
        section["bytes"] += tensor.size_bytes
    answer: dict[str, Any] = {
        "folder": store.locate(step.name),
        "step": manifest.step,
        "time": manifest.time,
        "world_size": manifest.world_size,
        "hash": manifest.algorithm,
        "bytes": manifest.data_bytes,
        "files": [file.name for file in manifest.files],
        "parity": [group["name"] for group in manifest.parity],
        "sections": sections,
        "values": manifest.values,
        "metadata": manifest.metadata,
    }
    if args.tensors:
        answer["tensors"] = {name: {"dtype": t.dtype, "shape": t.shape} for name, t in manifest.tensors.items()}
    lines = [
        f"step      {manifest.step}",
        f"folder    {answer['folder']}",
        f"written   {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(manifest.time))} by {manifest.world_size} ranks",
        f"size      {format_bytes(manifest.data_bytes)} in {len(manifest.files)} files, {manifest.algorithm}"
        + (", with parity" if manifest.parity else ""),
        *(f"{name:<9} {s['tensors']} tensors, {format_bytes(s['bytes'])}" for name, s in sections.items()),
        *(f"values    {name}: {_short(value)}" for name, value in manifest.values.items()),
        *(f"metadata  {name}: {_short(value)}" for name, value in manifest.metadata.items()),
    ]
    if args.tensors:
        lines += [f"  {t.dtype:<8} {list(t.shape)!s:<20} {name}" for name, t in manifest.tensors.items()]
    lines.append(f"next: keepstep ckpt verify {answer['folder']}")
    _print(args, answer, lines)
    return EXIT_DONE


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _verify(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.manifest import MARKER
    from keepstep.checkpoint.verify import step_problems

    store, name = _open(args.places[0])
    damages: list[CheckpointError] = []
    if name is not None or args.step is not None:
        steps = [_choose(args.places[0], args.step)[1]]
    else:
        steps = _steps(store, damages)
    found: dict[str, list[str]] = {}
    removed: list[str] = []
    for step in steps:
        wrong = step_problems(store, step)
        # Reading takes long, and a run that is under way removes old steps meanwhile, their marker first.
        if wrong and MARKER not in store.names(step.name):
            removed.append(step.name)
        else:
            found[step.name] = wrong
    problems = [error.message for error in damages] + [
        problem for found_here in found.values() for problem in found_here
    ]
    whole = [name for name, found_here in found.items() if not found_here]
    answer = {
        "place": store.locate(),
        "steps": found,
        "damaged_markers": [error.message for error in damages],
        "removed_meanwhile": removed,
    }
    lines = [f"{name:<20} {'whole' if not found[name] else 'DAMAGED'}" for name in found]
    lines += [f"{name:<20} removed meanwhile" for name in removed]
    lines += [f"  {problem}" for problem in problems]
    if problems:
        # Each by its own folder: without a step, repair looks at the newest only.
        lines += [f"next: keepstep ckpt repair {store.locate(name)}" for name in found if found[name]]
    elif whole:
        lines.append("every byte is as it was written")
    else:
        lines.append("no steps")
    _print(args, answer, lines)
    return EXIT_FAILED if problems else EXIT_DONE


def _repair(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.parity import mend

    store, step = _choose(args.places[0], args.step)
    problems, rebuilt = mend(store, step)
    answer = {"folder": store.locate(step.name), "problems": problems, "rebuilt": rebuilt}
    lines = [f"found    {problem}" for problem in problems] + [f"rebuilt  {name}" for name in rebuilt]
    lines.append(f"{step.name} is whole" if not rebuilt else f"{step.name} is whole again, every byte checked")
    _print(args, answer, lines)
    return EXIT_DONE


def _gc(args: argparse.Namespace) -> int:
    from keepstep.checkpoint import commit, retention

    store, _ = _open(args.places[0])
    rules = retention.Rules(args.keep, args.keep_every, args.keep_best)
    notes: list[str] = []
    if args.yes:
        removed = retention.apply(store, rules, notes.append)
        # Looked for now and not before: deleting takes a while, and a run that is under way commits in the meantime.
        abandoned = retention.abandoned(store, notes.append)
        unfinished = [name for name in abandoned if commit.remove_leftover(store, name)]
    else:
        removed = retention.removable(store, rules, notes.append)
        unfinished = list(retention.abandoned(store, notes.append))
    answer = {"removed" if args.yes else "would_remove": [*removed, *unfinished], "notes": notes}
    word = "removed" if args.yes else "would remove"
    lines = [f"{word} {name}" for name in removed] + [f"{word} {name}, never committed" for name in unfinished]
    lines += notes
    if not removed and not unfinished:
        lines.append("nothing to remove")
    elif not args.yes:
        lines.append("next: the same command with --yes")
    _print(args, answer, lines)
    return EXIT_DONE


def _convert(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.convert import write_any
    from keepstep.train.convert import PRECISIONS, open_source, write_hf

    source, target = args.places
    if args.to is None:
        raise UsageError("keepstep ckpt convert needs --to", "--to sharded, full, safetensors, dcp or hf")
    if args.shards < 1:
        raise UsageError(f"--shards is {args.shards}, and must be at least 1")
    # Training loads fp32 weights, so that is what another trainer's become in our own forms.
    ours = args.dtype if args.dtype != "auto" else "fp32"
    dtype = PRECISIONS[ours] if args.to in ("sharded", "full") else None
    with open_source(source, args.config, args.step or 0, dtype) as content:
        if args.to == "hf":
            written = write_hf(content, Path(target), args.config, args.dtype)
        else:
            written = write_any(content, target, args.to, args.shards, args.parity)
    answer = {"written": written, "step": content.step, "tensors": len(content.tensors)}
    lines = [f"wrote {written}: step {content.step}, {len(content.tensors)} tensors read"]
    if args.to in ("sharded", "full"):
        lines.append(f"next: keepstep ckpt verify {written}")
    _print(args, answer, lines)
    return EXIT_DONE


def _diff(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.compare import differences
    from keepstep.checkpoint.offline import OpenStep

    first, second = (OpenStep(*_choose(place)) for place in args.places)
    found, compared = differences(first, second)
    answer = {
        "compared": compared,
        "same": compared - sum(d.kind not in ("only_in_first", "only_in_second") for d in found),
    }
    answer_full = {**answer, "differences": [difference.__dict__ for difference in found]}
    lines = [f"{difference.kind:<14} {difference.name}: {difference.detail}" for difference in found]
    lines.append(f"{answer['same']} of {compared} tensors that both hold are the same, bit for bit")
    _print(args, answer_full, lines)
    return EXIT_FAILED if found else EXIT_DONE
