"""`keepstep ckpt`: list, check, repair, rescue, clean up, convert and compare checkpoints."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.cli.parser import Call, add_action, add_actions, positive
from keepstep.core.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, KeepstepError
from keepstep.core.units import format_bytes, format_seconds
from keepstep.observe.screen import clock

if TYPE_CHECKING:
    from keepstep.observe.run_folder import RunFolder

_PLACE = "a run folder, its checkpoints folder or one step; a path or an s3://, gs:// or abfs:// URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = add_actions(parser)

    def add(name: str, call: Call, summary: str, *places: str) -> argparse.ArgumentParser:
        action = add_action(actions, name, call, summary)
        for place in places:
            action.add_argument(place.lower(), metavar=place, help=_PLACE)
        action.add_argument("--json", action="store_true", help="print JSON")
        return action

    add("ls", _ls, "list committed steps, newest first, and uncommitted ones", "PLACE")
    add("du", _du, "show the bytes of each step", "PLACE")
    show = add("show", _show, "show the content of one step (default: the newest)", "PLACE")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = add("verify", _verify, "read and check every byte of one step, or of all", "PLACE")
    repair = add("repair", _repair, "rebuild damaged files from parity", "PLACE")
    for action in (show, verify, repair):
        action.add_argument("--step", type=int, metavar="N", help="this step")
    rescue = add("rescue", _rescue, "save the newest step in the memory of a running job to another folder")
    rescue.add_argument("run", type=Path, metavar="RUN", help="the folder of a run whose launcher runs on this machine")
    rescue.add_argument("--to", required=True, metavar="FOLDER", help="where to write the checkpoint")
    gc = add("gc", _gc, "delete old and uncommitted steps; only lists them without --yes", "PLACE")
    gc.add_argument("--keep", type=int, default=3, metavar="N", help="newest commits to keep (default: 3)")
    gc.add_argument("--keep-every", type=int, default=0, metavar="N", help="also keep steps divisible by N")
    gc.add_argument("--keep-best", type=int, default=0, metavar="N", help="also keep N steps with the lowest loss")
    gc.add_argument("--yes", action="store_true", help="delete them")
    _add_convert(add("convert", _convert, "write a checkpoint in another format"))
    add("diff", _diff, "show which tensors differ between two steps", "FIRST", "SECOND")


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("source", metavar="SOURCE", help=f"{_PLACE}; or a checkpoint of another trainer")
    convert.add_argument("target", metavar="TARGET", help="the folder or file to write")
    forms = ("sharded", "full", "safetensors", "dcp", "hf")
    convert.add_argument("--to", required=True, choices=forms, help="the format to write")
    convert.add_argument("--step", type=int, metavar="N", help="the step of a foreign SOURCE")
    convert.add_argument("--config", type=Path, help="a run.yaml with the model's shape, if SOURCE does not have it")
    dtype = "dtype of the weights from or to other trainers (default: fp32 in keepstep's formats, else unchanged)"
    convert.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help=dtype)
    convert.add_argument("--shards", type=positive, default=1, metavar="N", help="with --to sharded: data files")
    convert.add_argument("--parity", action="store_true", help="add a parity file")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    try:
        code: int = args.call(args)
        return code
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        hint = "check that the location can be reached, and that your user or credentials may use it"
        raise CheckpointError(f"keepstep ckpt {args.action}: {error}", hint) from error


def _print(args: argparse.Namespace, answer: Any, lines: list[str], code: int = EXIT_DONE) -> int:
    """Print the answer as JSON or in lines; returns the exit code."""
    from keepstep.observe.view import jsonable

    print(json.dumps(jsonable(answer), indent=2, allow_nan=False) if args.json else "\n".join(lines))
    return code


def _ls(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import list_steps, open_place

    store, _ = open_place(args.place)
    steps, damaged, uncommitted = list_steps(store)
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
        "damaged": damaged,
        "uncommitted": list(uncommitted),
    }
    now = time.time()
    lines = [
        f"{step.name:<20} {format_bytes(step.marker.data_bytes):>10}  {step.marker.world_size:>4} ranks  "
        f"{format_seconds(max(now - step.marker.time, 0))} ago{'  latest' if number == 0 else ''}"
        for number, step in enumerate(steps)
    ]
    lines += [f"damaged: {message}" for message in damaged]
    lines += [f"{name:<20} {'being written' if busy else 'not committed'}" for name, busy in uncommitted.items()]
    return _print(args, answer, [*(lines or ["no steps"]), f"next: keepstep ckpt verify {args.place}"])


def _du(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import disk_usage, open_place

    store, only = open_place(args.place)
    sizes = disk_usage(store, only)
    total = sum(size for size, _ in sizes.values())
    free = store.free_bytes()
    steps = {name: {"bytes": size, "committed": committed} for name, (size, committed) in sizes.items()}
    answer = {"place": store.locate(), "steps": steps, "total_bytes": total, "free_bytes": free}
    lines = [
        f"{format_bytes(size):>10}  {name}{'' if committed else '  not committed'}"
        for name, (size, committed) in sizes.items()
    ]
    lines.append(f"{format_bytes(total):>10}  in all" + (f", {format_bytes(free)} free" if free is not None else ""))
    return _print(args, answer, [*lines, f"next: keepstep ckpt gc {args.place}"])


def _show(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import choose_step, section_sizes
    from keepstep.checkpoint.protocol.commit import read_manifest

    store, step = choose_step(args.place, args.step)
    manifest = read_manifest(store, step)
    sections = section_sizes(manifest)
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
    lines = [
        f"step      {manifest.step}",
        f"folder    {answer['folder']}",
        f"written   {clock(manifest.time)} by {manifest.world_size} ranks",
        f"size      {format_bytes(manifest.data_bytes)} in {len(manifest.files)} files, {manifest.algorithm}"
        + (", with parity" if manifest.parity else ""),
        *(f"{name:<9} {s['tensors']} tensors, {format_bytes(s['bytes'])}" for name, s in sections.items()),
        *(f"values    {name}: {_short(value)}" for name, value in manifest.values.items()),
        *(f"metadata  {name}: {_short(value)}" for name, value in manifest.metadata.items()),
    ]
    if args.tensors:
        answer["tensors"] = {name: {"dtype": t.dtype, "shape": t.shape} for name, t in manifest.tensors.items()}
        lines += [f"  {t.dtype:<8} {list(t.shape)!s:<20} {name}" for name, t in manifest.tensors.items()]
    return _print(args, answer, [*lines, f"next: keepstep ckpt verify {answer['folder']}"])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _verify(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import choose_step, list_steps, open_place, verify

    store, name = open_place(args.place)
    one = name is not None or args.step is not None
    steps, damaged, _ = ([choose_step(args.place, args.step)[1]], [], {}) if one else list_steps(store)
    checked, removed = verify(store, steps)
    answer = {"place": store.locate(), "steps": checked, "damaged_markers": damaged, "removed_meanwhile": removed}
    lines = [f"{name:<20} {'DAMAGED' if problems else 'intact'}" for name, problems in checked.items()]
    lines += [f"{name:<20} removed meanwhile" for name in removed]
    problems = [*damaged, *(problem for found in checked.values() for problem in found)]
    lines += [f"  {problem}" for problem in problems]
    if problems:
        # Each by its own folder: without a step, repair takes the newest.
        lines += [f"next: keepstep ckpt repair {store.locate(name)}" for name, wrong in checked.items() if wrong]
    else:
        lines.append("every byte is as it was written" if checked else "no steps")
    return _print(args, answer, lines, EXIT_FAILED if problems else EXIT_DONE)


def _repair(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import choose_step
    from keepstep.checkpoint.protocol.parity import repair

    store, step = choose_step(args.place, args.step)
    problems, rebuilt = repair(store, step)
    answer = {"folder": store.locate(step.name), "problems": problems, "rebuilt": rebuilt}
    lines = [f"found    {problem}" for problem in problems] + [f"rebuilt  {name}" for name in rebuilt]
    lines.append(f"{step.name} is intact" if not rebuilt else f"{step.name} is repaired, every byte checked")
    return _print(args, answer, lines)


def _rescue(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.in_memory.rescue import rescue
    from keepstep.checkpoint.protocol.commit import newest_sequence
    from keepstep.checkpoint.storage.object_store import parse_url
    from keepstep.checkpoint.storage.store import open_store
    from keepstep.observe.run_folder import RunFolder
    from keepstep.resilience.registration import agent_of

    folder = RunFolder(args.run)
    agent = agent_of(args.run) if args.run.is_dir() else None
    if agent is None:
        raise CheckpointError(
            f"no agent runs in {args.run} on this machine, so none of its steps are in memory",
            f"keepstep ckpt ls {args.run} lists those on disk" if args.run.is_dir() else "check the folder of the run",
        )
    own = _own_checkpoints(folder)
    store = open_store(args.to if parse_url(args.to) else Path(args.to).absolute())
    step = rescue(agent, store, after=newest_sequence(open_store(own)))
    written = store.locate(step.name)
    command = f"keepstep train {folder.config}" if folder.config.is_file() else "the command of the run with"
    resume = f"{command} checkpoint.resume_from={written}"
    answer = {"step": step.step, "folder": written, "bytes": step.marker.data_bytes, "agent": agent, "resume": resume}
    size = format_bytes(step.marker.data_bytes)
    lines = [
        f"step {step.step} of {args.run} is in {written}: {size}, {step.marker.world_size} ranks, every byte checked",
        f"To continue from it, copy that folder into {own} when there is room; or end the run, then start it with",
        f"next: {resume}",
    ]
    return _print(args, answer, lines)


def _own_checkpoints(folder: RunFolder) -> str:
    """Where the run saves. A disk that was full from the start may have no config file."""
    from keepstep.config.load import load_config

    with suppress(KeepstepError, OSError):
        return load_config(folder.config, []).config.checkpoint.folder or str(folder.checkpoints)
    return str(folder.checkpoints)


def _gc(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import open_place
    from keepstep.checkpoint.protocol import commit, retention

    store, _ = open_place(args.place)
    rules = retention.Rules(args.keep, args.keep_every, args.keep_best)
    notes: list[str] = []
    if args.yes:
        removed = retention.apply(store, rules, notes.append)
        # Search now, not before: deleting takes a while, and a running job commits meanwhile.
        abandoned = retention.abandoned(store, notes.append)
        uncommitted = [name for name in abandoned if commit.remove_uncommitted(store, name)]
    else:
        removed = retention.removable(store, rules, notes.append)
        uncommitted = list(retention.abandoned(store, notes.append))
    answer = {"removed" if args.yes else "would_remove": [*removed, *uncommitted], "notes": notes}
    word = "removed" if args.yes else "would remove"
    lines = [f"{word} {name}" for name in removed] + [f"{word} {name}, not committed" for name in uncommitted]
    lines += notes
    if not removed and not uncommitted:
        lines.append("nothing to remove")
    elif not args.yes:
        lines.append("next: the same command with --yes")
    return _print(args, answer, lines)


def _convert(args: argparse.Namespace) -> int:
    from keepstep.interop.convert import PRECISIONS, open_source, write_checkpoint, write_hf

    # Training loads fp32 weights, so weights of other trainers become fp32 in keepstep's own formats.
    ours = args.dtype if args.dtype != "auto" else "fp32"
    dtype = PRECISIONS[ours] if args.to in ("sharded", "full") else None
    with open_source(args.source, args.config, args.step or 0, dtype) as content:
        if args.to == "hf":
            written = write_hf(content, Path(args.target), args.config, args.dtype)
        else:
            written = write_checkpoint(content, args.target, args.to, args.shards, args.parity)
    answer = {"written": written, "step": content.step, "tensors": len(content.tensors)}
    lines = [f"wrote {written}: step {content.step}, {len(content.tensors)} tensors read"]
    if args.to in ("sharded", "full"):
        lines.append(f"next: keepstep ckpt verify {written}")
    return _print(args, answer, lines)


def _diff(args: argparse.Namespace) -> int:
    from keepstep.checkpoint.inspect import choose_step
    from keepstep.checkpoint.offline import StepReader, differences

    found, compared = differences(*(StepReader(*choose_step(place)) for place in (args.first, args.second)))
    same = compared - sum(each.kind not in ("only_in_first", "only_in_second") for each in found)
    lines = [f"{each.kind:<14} {each.name}: {each.detail}" for each in found]
    lines.append(f"{same} of {compared} tensors that both hold are the same, bit for bit")
    answer = {"compared": compared, "same": same, "differences": [asdict(each) for each in found]}
    return _print(args, answer, lines, EXIT_FAILED if found else EXIT_DONE)
