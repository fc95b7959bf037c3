"""Assemble a run: data, model, parallel, optimizer, checkpoint, then the loop.

The only file that sees the whole configuration; every part below is handed its own section.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep import __version__
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.dump import dump_config
from keepstep.config.layout import Layout
from keepstep.config.schema import RunConfig
from keepstep.core.files import write_atomic, write_json
from keepstep.core.ranks import from_environment
from keepstep.core.units import format_count
from keepstep.data.chat_loader import ChatSource, build_chat_loaders, is_chat
from keepstep.data.chat_tokenizer import keep_tokenizer
from keepstep.data.loader import Loaders, StepFeed, build_loaders
from keepstep.models.size import parameter_count
from keepstep.observe.folder import RunFolder
from keepstep.observe.progress import Progress
from keepstep.observe.sinks import build_sinks
from keepstep.parallel.mesh import build_grid
from keepstep.parallel.world import World, choose_device, joined_world, share_cores
from keepstep.resilience.signals import StopFlag, stop_on_signals
from keepstep.train.best import BestWeights
from keepstep.train.build import build_learner, check_layout, compute_dtype, device_name, device_peak_flops
from keepstep.train.clock import Clock, Pace
from keepstep.train.loop import LoopParts, run_loop
from keepstep.train.profile import Profiler, memory_snapshot_on_oom
from keepstep.train.record import Rates, Recorder
from keepstep.train.start import BEST, TOKENIZER, find_tokenizer
from keepstep.train.state import TrainState, seed_everything
from keepstep.train.validate import ValidationRows, validate


@dataclass(frozen=True)
class Machine:
    """What a run finds itself on, in plain numbers."""

    device: str
    memory_bytes: int
    peak_flops: float
    precision: str
    processes: int
    processes_per_node: int


Planner = Callable[[RunConfig, Machine], dict[str, Any]]
"""What a run should need and reach on a machine; stored with it."""


def train(config: RunConfig, planner: Planner | None = None) -> None:
    """Run to the end, or to a saved stop. Every process of the run calls this with the same configuration."""
    ranks = from_environment()
    layout = check_layout(config, ranks.world_size)
    device = choose_device(config.compute.device, ranks.local_rank)
    share_cores(config.compute.threads, ranks.local_world_size)
    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    with (
        stop_on_signals() as stop,
        joined_world(ranks, device) as world,
        memory_snapshot_on_oom(config.profile, folder.profile, ranks.rank, device),
    ):
        _Run(config, world, layout, folder).go(stop, planner)


def open_data(config: RunConfig) -> Loaders:
    """The run's rows: a stream of tokens, or conversations with a loss on what the assistant says."""
    data, cache_dir = config.data, Path(config.runs_dir) / ".data"
    if not is_chat(data, config.chat):
        return build_loaders(data, config.model.seq_len, config.model.vocab, config.seed, cache_dir)
    start = config.finetune.start_from
    reading = Pace(config.global_batch, config.model.seq_len, 0).steps(config.chat.read_first) or 0
    source = ChatSource(
        data=data,
        chat=config.chat,
        seq_len=config.model.seq_len,
        vocab=config.model.vocab,
        seed=config.seed,
        tokenizer=find_tokenizer(Path(start)) if start else None,
        whole_samples=reading * config.global_batch,
    )
    return build_chat_loaders(source, cache_dir)


class _Run:
    """The parts of one run and the few actions that join several of them."""

    def __init__(self, config: RunConfig, world: World, layout: Layout, folder: RunFolder) -> None:
        self.config, self.world, self.folder = config, world, folder
        device, model_config = world.device, config.model
        dtype = compute_dtype(config.precision, device)
        grid = build_grid(layout, device.type)
        self.data_rank, self.data_ranks = grid.data_rank, layout.data_ranks

        self.loaders = open_data(config)
        self.clock = Clock(Pace(config.global_batch, model_config.seq_len, self.loaders.train.samples_per_epoch))
        self.recorder = self._open_recorder(dtype)

        seed_everything(config.seed, world.ranks.rank)
        learner = build_learner(config, grid, device)
        self.step = learner.step
        self.state = TrainState(learner.model, learner.optimizers, learner.scaler, self.clock)
        where = Path(config.checkpoint.folder) if config.checkpoint.folder else folder.checkpoints
        self.checkpointer = Checkpointer(where, config.checkpoint, on_event=self._checkpoint_event)
        self.best = BestWeights(folder.root / BEST, config.evaluate)

    def go(self, stop: StopFlag, planner: Planner | None) -> None:
        """Resume where a checkpoint allows it, then train."""
        self._describe(planner)
        self._resume()
        feed = StepFeed(
            self.loaders.train,
            at=self.clock.samples,
            global_batch=self.config.global_batch,
            microbatch=self.config.microbatch,
            rank=self.data_rank,
            ranks=self.data_ranks,
            prefetch=self.config.data.prefetch,
        )
        profiler = Profiler(self.config.profile, self.folder.profile, self.world.ranks.rank, self.world.device)
        parts = LoopParts(
            step=self.step,
            feed=feed,
            clock=self.clock,
            recorder=self.recorder,
            profiler=profiler,
            stop=stop,
            save=self.save,
            before_update=self._before_update,
            evaluate=self.evaluate,
            enough=lambda: self.best.enough,
        )
        self.checkpointer.prepare(self.state.tensors())
        outcome = "fault"
        try:
            with profiler:
                run_loop(parts, self.config)
            # Together while all are well; closing must not wait for a process that is gone.
            self.checkpointer.wait()
            outcome = "finish"
        finally:
            feed.close()
            self.checkpointer.close()
            self.recorder.event("stop" if stop.requested and outcome != "finish" else outcome, step=self.clock.step)
            self.recorder.close()

    def save(self, durable: bool) -> None:
        """Save the step just done: behind training, or so that it is on disk when this returns."""
        metadata: dict[str, Any] = {"keepstep": __version__, "torch": torch.__version__}
        metadata |= {"world_size": self.world.ranks.world_size, "loss": self.recorder.last_loss}
        state = {**self.state.tensors(), "numbers": self.state.numbers()}
        write = self.checkpointer.save if durable else self.checkpointer.save_async
        write(self.clock.step, state, {**metadata, "config": dump_config(self.config)})

    def _before_update(self) -> None:
        """Weights are about to change: a save under way must have its copy, and may have news."""
        self.checkpointer.before_update()
        self.checkpointer.poll()

    def evaluate(self) -> None:
        """Validation loss over the first rows of the validation data."""
        if self.loaders.valid is None:
            self.recorder.note("no validation data: evaluation is skipped")
            return
        wanted = self.config.evaluate.batches * self.config.global_batch
        rows = ValidationRows(
            loader=self.loaders.valid,
            rows=min(wanted, self.loaders.valid.samples_per_epoch),
            microbatch=self.config.microbatch,
            data_rank=self.data_rank,
            data_ranks=self.data_ranks,
        )
        started = time.perf_counter()
        self.state.model.eval()
        result = validate(self.step.evaluate, rows, self.world.device)
        self.state.model.train()
        self.recorder.validated(self.clock.step, result)
        self.recorder.event("evaluate", step=self.clock.step, seconds=time.perf_counter() - started)
        if self.best.offer(self.clock.step, result.loss, self.state.weights):
            self.recorder.note(f"step {self.clock.step}: the lowest validation loss so far, weights kept as {BEST}")

    def _resume(self) -> None:
        settings = self.config.checkpoint
        self.recorder.event("start", step=0, world_size=self.world.ranks.world_size, restarts=self.world.ranks.restarts)
        if not settings.autoresume and not settings.resume_from:
            return
        into = self.state.tensors()
        if settings.skip_optimizer and settings.resume_from:
            into = {"model": into["model"]}
        loaded = self.checkpointer.load_newest(into)
        if loaded is None:
            return
        if settings.skip_optimizer and settings.resume_from:
            self.state.optimizers.adopt(into["model"])
            self.recorder.note(f"weights from {loaded.where.name}; optimizer, schedule and data start afresh")
            return
        self.state.adopt(loaded.values["numbers"], into)
        self.recorder.event("resume", step=self.clock.step, folder=loaded.where.name)
        self.recorder.note(f"resumed at step {self.clock.step} from {loaded.where.name}")

    def _open_recorder(self, dtype: torch.dtype) -> Recorder:
        config, device = self.config, self.world.device
        tokens_per_step = config.global_batch * config.model.seq_len
        peak = device_peak_flops(device, dtype) * self.world.ranks.world_size
        rates = Rates.of(config.model, tokens_per_step, peak, config.optimizer.lr, frozen=config.lora.rank > 0)
        sinks = build_sinks(self.folder, config.observe, self.world.ranks, _tracked(config))
        if not self.world.is_first:
            return Recorder(config.observe, rates, sinks, None, device)
        progress = Progress(self.clock.pace.steps(config.max_duration) or 0, tokens_per_step)
        return Recorder(config.observe, rates, sinks, progress, device)

    def _describe(self, planner: Planner | None) -> None:
        if not self.world.is_first:
            return
        config, parameters = self.config, parameter_count(self.config.model)
        write_atomic(self.folder.config, dump_config(config))
        if self.loaders.tokenizer is not None:
            keep_tokenizer(self.loaders.tokenizer, self.folder.root / TOKENIZER, config.chat.template)
        facts = _facts(config, self.world, self.loaders, parameters)
        if planner is not None:
            facts["plan"] = planner(config, _machine(config, self.world))
        write_json(self.folder.facts, facts)
        self.recorder.note(
            f"{config.name}: {config.model.preset} {format_count(parameters)} parameters on "
            f"{self.world.ranks.world_size} × {device_name(self.world.device)}, "
            f"{format_count(config.global_batch * config.model.seq_len)} tokens a step, until {config.max_duration}"
        )

    def _checkpoint_event(self, kind: str, fields: dict[str, Any]) -> None:
        self.recorder.event(kind, **fields)
        if kind == "checkpoint_committed":
            self.recorder.last_saved_at = time.time()
        elif kind in ("warning", "fault"):
            self.recorder.note(f"warning: {fields.get('message', kind)}")


def _tracked(config: RunConfig) -> dict[str, Any]:
    """What an experiment tracker files a run under."""
    return {
        "model": config.model.preset,
        "parameters": parameter_count(config.model),
        "data": config.data.path,
        "global_batch": config.global_batch,
        "seq_len": config.model.seq_len,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "max_duration": str(config.max_duration),
        "seed": config.seed,
    }


def _machine(config: RunConfig, world: World) -> Machine:
    dtype = compute_dtype(config.precision, world.device)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    if world.device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.ranks.local_world_size
    return Machine(
        device=device_name(world.device),
        memory_bytes=memory_bytes,
        peak_flops=device_peak_flops(world.device, dtype),
        precision="fp8" if config.precision == "fp8" else name,
        processes=world.ranks.world_size,
        processes_per_node=world.ranks.local_world_size,
    )


def _facts(config: RunConfig, world: World, loaders: Loaders, parameters: int) -> dict[str, Any]:
    pace = Pace(config.global_batch, config.model.seq_len, loaders.train.samples_per_epoch)
    return {
        "keepstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "device": device_name(world.device),
        "world_size": world.ranks.world_size,
        "parameters": parameters,
        "total_steps": pace.steps(config.max_duration),
        "samples_per_epoch": loaders.train.samples_per_epoch,
        "tokenizer": str(loaders.tokenizer) if loaders.tokenizer else None,
        "data": loaders.facts,
    }
