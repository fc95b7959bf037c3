"""`keepstep train`: check the configuration, then train here, in processes under an agent, or as one of them.

`keepstep finetune` turns a few flags into a configuration, then trains with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.cli.parser import CONFIG_HELP, run_name
from keepstep.config.dump import model_overrides, written
from keepstep.config.load import load_config, split_words
from keepstep.config.schema import RunConfig
from keepstep.core.errors import EXIT_FAILED, ConfigError, KeepstepError, StopRequested, UsageError
from keepstep.core.ranks import NodeGroup, Ranks, from_environment, node_number
from keepstep.core.verbosity import debug

_WARM_MODULES = ("keepstep.cli.train", "keepstep.train.trainer")
"""Modules of a training process that the agent imports ahead of time, so that a restart is quick."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add = parser.add_argument
    add("words", nargs="*", metavar="run.yaml | section.field=value", help=CONFIG_HELP)
    add("--procs", default="auto", metavar="N", help="processes on this machine (default: auto, one per GPU)")
    add("--spares", type=int, metavar="N", help="processes that wait to replace a lost one (see resilience.survive)")
    add("--ui", action="store_true", help="serve the live page while training, and print its link")
    add(
        "--on",
        default="local",
        metavar="WHERE",
        help="local, slurm:PROFILE, k8s:PROFILE, sky:PROFILE or ssh:HOSTS (default: local)",
    )
    add("-N", "--nodes", type=int, metavar="N", help="nodes, with --on (default: the profile's)")
    add("--dry-run", action="store_true", help="with --on: print what would be submitted, and stop")
    add("--name", type=run_name, help="the run's name")
    parser.set_defaults(call=_train, not_asked_for=())


def add_finetune(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep finetune`."""
    add_arguments(parser)
    add = parser.add_argument
    add("--from", dest="start", metavar="DIR", help="a run, a Hugging Face model, or OWNER/NAME on its Hub")
    add("--data", metavar="PATH", help="conversations: .jsonl, .json, .parquet, or toolcalls to generate some")
    rank = "train adapters of this rank (default: 16) instead of all weights"
    add("--lora", type=_rank, nargs="?", const=16, metavar="RANK", help=rank)
    add("--base", choices=("bf16", "fp8", "nf4"), help="with --lora: format of the frozen weights (default: bf16)")
    add("--epochs", type=float, metavar="N", help="passes over the data")
    parser.set_defaults(call=_finetune)


def _rank(text: str) -> int:
    if not text.isdecimal():
        # A setting that follows is taken for the rank.
        remedy = f"write --lora 16 {text}" if "=" in text else "write a whole number, such as --lora 16"
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank; {remedy}")
    return int(text)


def _train(args: argparse.Namespace) -> int:
    """Train: as a worker if a launcher started this process, else by starting the workers."""
    if args.name is not None:
        args.words = [*args.words, f"name={written(args.name)}"]
    if args.spares is not None:
        args.words = [*args.words, f"resilience.spares={args.spares}"]
    path, overrides = split_words(args.words)
    ranks = from_environment()
    keys = {override.partition("=")[0] for override in overrides}
    if path is None and args.on == "local" and not keys & {"data", "data.path", "data.blend"}:
        raise _without_data(overrides)
    config = load_run(path, overrides, for_pods=args.on.startswith(("k8s", "sky")) and not ranks.launched)
    if ranks.launched:
        return _train_as_worker(ranks, config)
    fixed = model_overrides(config)
    if args.on != "local" or args.nodes is not None or args.dry_run:
        from keepstep.launch.submit import RunRequest, submit_run

        _refuse_local_flags(args)
        request = RunRequest(path, [*overrides, *fixed], config, args.nodes, frozenset(args.not_asked_for))
        return submit_run(args.on, request, args.dry_run)
    if args.ui:
        from keepstep.cli.runs import start_page_process

        print(f"live page: {start_page_process(Path(config.runs_dir), config.name)}", file=sys.stderr, flush=True)
    from keepstep.config.layout import check_layout
    from keepstep.launch.local import check_memory_here, process_count

    spares = config.resilience.spares * config.replica_size
    processes = process_count(args.procs, config.compute.device, spares)
    # Here, before any process starts: otherwise each of them would report the same problem.
    check_layout(config, processes)
    check_memory_here(config, processes, processes + spares)
    if processes == 1 and not config.resilience.max_restarts:
        from keepstep.train.trainer import train

        train(config)
        code = 0
    else:
        code = start_processes(["train", *args.words, *fixed], processes, config=config)
    if code == 0:
        print(f"done: {config.runs_dir}/{config.name}")
    return code


def _without_data(overrides: list[str]) -> KeepstepError:
    """That there is no data, next to all that is wrong with what was given."""
    missing = UsageError(
        "there is no config file and no data to train on",
        "run keepstep new NAME and then keepstep train NAME/run.yaml, or name the data: data=PATH or data=demo",
    )
    try:
        load_config(None, overrides)
    except ConfigError as error:
        return ConfigError([*error.problems, missing])
    return missing


def _refuse_local_flags(args: argparse.Namespace) -> None:
    """Raise for a flag that a submitted run would ignore."""
    if args.procs != "auto":
        raise UsageError(
            f"--procs {args.procs} is for this machine, but the run goes to {args.on}",
            "set processes_per_node (Slurm, ssh), gpus_per_node (Kubernetes) or accelerators (sky) in the profile",
        )
    if args.ui:
        raise UsageError(
            f"--ui is for this machine, but the run goes to {args.on}", "run keepstep ui once the run has started"
        )


def load_run(path: Path | None, overrides: list[str], *, for_pods: bool = False) -> RunConfig:
    """The configuration; a run that starts from given weights takes their shape."""
    loaded = load_config(path, overrides)
    start = loaded.config.finetune.start_from
    # This machine may not see the volume of the pods: they check the weights themselves.
    if not start or (for_pods and start.startswith("/") and not Path(start).exists()):
        return loaded.config
    from keepstep.interop.run_source import adopt_initial_shape

    return adopt_initial_shape(loaded)


def _train_as_worker(ranks: Ranks, config: RunConfig) -> int:
    from keepstep.resilience.failure_cause import classify, write_cause
    from keepstep.train.trainer import train

    try:
        train(config)
        return 0
    except KeepstepError as error:
        write_cause(error, ranks.rank)
        stopped = isinstance(error, StopRequested)
        # The agent prints the error of the run. Without one, the first worker prints what all of them find.
        mine = ranks.is_first or not (stopped or isinstance(error, ConfigError))
        if mine and (stopped or not ranks.supervised):
            where = "" if ranks.is_first else f"[rank {ranks.rank}] "
            print("\n".join(where + line for line in error.lines()), file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        write_cause(error, ranks.rank)
        if ranks.supervised:
            # Its traceback is in the run's logs, and the agent prints the cause.
            return EXIT_FAILED
        if classify(error) == "peer":
            # A traceback about a closed connection would hide the one of the worker that failed.
            print(f"[rank {ranks.rank}] lost the connection to another worker: {error}", file=sys.stderr, flush=True)
            return EXIT_FAILED
        raise


def start_processes(
    words: Sequence[str], processes: int, group: NodeGroup | None = None, config: RunConfig | None = None
) -> int:
    """Run `keepstep WORDS` in this many processes on this node; `config` is the run's, if the verb trains one."""
    from keepstep.cli.main import main
    from keepstep.resilience.agent import AgentSettings, run_processes
    from keepstep.resilience.workers import Task

    if config is None:
        return run_processes(Task(main, words), processes, group)
    from keepstep.observe.logs import recording
    from keepstep.observe.run_folder import JsonLines, RunFolder

    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    events = JsonLines(folder.events)

    lost: list[str] = []
    before = len(events.read())

    def is_over() -> bool:
        return any(event.get("kind") == "finish" for event in events.read()[before:])

    def record(kind: str, **facts: Any) -> None:
        # The disk may be full, which is often the fault itself: the restart matters more than the event.
        try:
            events.append({"time": time.time(), "kind": kind, **facts})
        except OSError as error:
            if not lost:
                print(f"warning: event {kind} is not in {folder.events}: {error.strerror}", file=sys.stderr)
            lost.append(kind)
        text = facts.get("what") or ", ".join(f"{name} {value}" for name, value in facts.items())
        logger.log(logging.ERROR if kind == "fault" else logging.INFO, "%s: %s", kind, text)
        debug(f"event {kind}: {text}")

    task = Task(
        main,
        words,
        _WARM_MODULES + (("tensorboard.summary.writer.record_writer",) if config.observe.tensorboard else ()),
    )
    with recording(folder.logs, "agent", node_number(os.environ)) as logger:
        retry_s, size = config.checkpoint.retry_s, config.replica_size
        settings = AgentSettings(config.resilience, retry_s, folder.root, folder.logs, record, is_over, size)
        return run_processes(task, processes, group, settings)


def _finetune(args: argparse.Namespace) -> int:
    """Turn flags into overrides and train."""
    path, given = split_words(args.words)
    if path is None:
        args.not_asked_for = {"global_batch", "microbatch"} - {word.partition("=")[0] for word in given}
    args.words = finetune_words(args)
    _check_given(args)
    code = _train(args)
    # A submitted run is no model yet, and of several workers each would print this.
    if code == 0 and args.on == "local" and not from_environment().launched:
        config = load_run(*split_words(args.words))
        where = shlex.quote(f"{config.runs_dir}/{config.name}")
        print(f"next: keepstep eval tools {where}   or   keepstep chat {where}")
    return code


def _check_given(args: argparse.Namespace) -> None:
    """Raise if the model or the data would be a default: nobody wants to fine-tune those."""
    path, words = split_words(args.words)
    origins = load_config(path, words).origins
    given = {name for name, origin in origins.items() if origin.kind not in ("default", "preset")}
    if not given & {"data.path", "data.blend"}:
        hint = "--data CONVERSATIONS.jsonl, or --data toolcalls to generate some"
        raise UsageError("finetune needs conversations", hint)
    if "finetune.start_from" not in given and not any(name.startswith("model.") for name in given):
        hint = "--from FOLDER of a run or a Hugging Face model, or OWNER/NAME on the Hub"
        raise UsageError("finetune needs a model to start from", hint)


def finetune_words(args: argparse.Namespace) -> list[str]:
    """The words for `keepstep train`. Without a config file, defaults that suit fine-tuning come first."""
    path, given = split_words(args.words)
    words: list[str] = [str(path)] if path else _defaults(args.lora or 0, given)
    flags = {
        "finetune.start_from": args.start,
        "data.path": args.data,
        "lora.rank": args.lora,
        "lora.base": args.base,
        "max_duration": None if args.epochs is None else f"{args.epochs:g}ep",
        "name": args.name,
    }
    # Quoted as in a YAML file: a path may look like a list, a number or a reference.
    words += [f"{field}={written(value)}" for field, value in flags.items() if value is not None]
    return words + given


def _defaults(rank: int, given: list[str]) -> list[str]:
    # A thousand conversations packed into long rows are a few steps: 20 steps of warmup would never reach the rate.
    in_epochs = all(word.endswith("ep") for word in given if word.startswith("max_duration="))
    # Adapters start from zero and need about ten times the learning rate of trained weights. Preference and
    # reinforcement learning move a model that answers already, and at the usual rate break it.
    methods = {word.partition(".")[0] for word in given if ".method=" in word and not word.endswith("=none")}
    lr = (1e-5 if rank else 1e-6) if methods else (2e-4 if rank else 2e-5)
    return [
        "name=finetune",
        "max_duration=3ep",
        f"global_batch={64 if 'rl' in methods else 32}",
        f"optimizer.lr={lr}",
        "optimizer.weight_decay=0.0",
        f"schedule.warmup={'0.1ep' if in_epochs else '20ba'}",
        "evaluate.interval=1ep",
        "evaluate.keep_best=true",
        "checkpoint.interval=1ep",
        "checkpoint.keep=1",
        "data.valid_share=0.05",
    ]
