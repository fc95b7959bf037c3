"""Assemble a run: data, model, parallel, optimizer, checkpoint, then the loop.

The only file that sees the whole configuration; every part below is handed its own section.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep import __version__
from keepstep.checkpoint.memory import holds_step
from keepstep.config.check import check_conversations, check_layout
from keepstep.config.dump import dump_config
from keepstep.config.layout import Layout
from keepstep.config.schema import RunConfig
from keepstep.core.errors import CheckpointError, DataError, NothingToReadError, StopRequested
from keepstep.core.files import write_atomic, write_json
from keepstep.core.ranks import from_environment
from keepstep.core.units import format_count
from keepstep.data.chat_loader import ChatSource, build_chat_loaders, is_chat, refuse_several
from keepstep.data.chat_tokenizer import keep_tokenizer
from keepstep.data.loader import Loader, Loaders, StepFeed, build_loaders, changed_order
from keepstep.data.remote import is_remote
from keepstep.evaluate.perplexity import PerplexityResult
from keepstep.models.size import parameter_count
from keepstep.observe.folder import RunFolder, read_last_step
from keepstep.observe.logs import recording
from keepstep.observe.progress import Progress
from keepstep.observe.sinks import build_sinks
from keepstep.parallel.mesh import build_grid
from keepstep.parallel.world import World, choose_device, joined_world, share_cores
from keepstep.resilience.alone import alone_in
from keepstep.resilience.chaos import Chaos
from keepstep.resilience.guard import Guard, Reading
from keepstep.resilience.pulse import Pulse
from keepstep.resilience.signals import StopFlag, stop_on_signals
from keepstep.train.begun import begun_after
from keepstep.train.best import BestWeights
from keepstep.train.build import build_learner, compute_dtype, device_name, device_peak_flops
from keepstep.train.clock import Clock, Pace
from keepstep.train.facts import Planner, facts_of, known_facts, tracked
from keepstep.train.keeper import Keeper
from keepstep.train.kernels import chosen_kernels
from keepstep.train.loop import LoopParts, run_loop
from keepstep.train.profile import Profiler, memory_snapshot_on_oom
from keepstep.train.recheck import compare_bits
from keepstep.train.record import Rates, Recorder
from keepstep.train.rewind import Rewind, SkippedSamples
from keepstep.train.samples import Prompts
from keepstep.train.saver import Saver
from keepstep.train.start import BEST, TOKENIZER, Origin, fill_from, find_tokenizer
from keepstep.train.state import TrainState, seed_everything
from keepstep.train.validate import ValidationRows, validate


def train(config: RunConfig, planner: Planner | None = None) -> None:
    """Run to the end, or to a saved stop. Every process of the run calls this with the same configuration."""
    ranks = from_environment()
    layout = check_layout(config, ranks.world_size)
    device = choose_device(config.compute.device, ranks.local_rank)
    exact = config.reproducible == "elastic"
    # Sums of two threads are not those of one: a share of the cores would depend on the number of processes.
    share_cores(config.compute.threads or int(exact), ranks.local_world_size)
    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    with (
        chosen_kernels(config),
        stop_on_signals() as stop,
        alone_in(folder.root, lambda: stop.requested) if ranks.is_first else nullcontext(),
        recording(folder.logs, "trainer", ranks.rank),
        joined_world(ranks, device, config.resilience.start_timeout_s) as world,
        memory_snapshot_on_oom(config.profile, folder.profile, ranks.rank, device),
    ):
        _Run(config, world, layout, folder).go(stop, planner)


def open_data(config: RunConfig) -> Loaders:
    """The run's rows: a stream of tokens, or conversations with a loss on what the assistant says."""
    data, cache_dir = config.data, Path(config.runs_dir) / ".data"
    if not is_chat(data, config.chat):
        refuse_several(data)
        return build_loaders(data, config.model.seq_len, config.model.vocab, config.seed, cache_dir)
    check_conversations(config)
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
        self.grid = grid
        self.data_rank, self.data_ranks = grid.data_rank, layout.data_ranks

        self.known_facts = known_facts(folder, world.ranks)
        self.loaders = self._open_data()
        self.clock = Clock(Pace(config.global_batch, model_config.seq_len, self.loaders.train.samples_per_epoch))
        self.recorder = self._open_recorder(dtype)
        self.recorder.positions = self.loaders.positions
        self.prompts = Prompts.of(config.evaluate, model_config, self.loaders.tokenizer)

        where = Path(config.checkpoint.folder) if config.checkpoint.folder else folder.checkpoints
        self.saver = Saver(where, config.checkpoint, self.recorder)
        self.checkpointer = self.saver.checkpointer
        if world.is_first:
            self.checkpointer.check_place()
        if not config.checkpoint.autoresume:
            newest_sequence = self.checkpointer.newest_sequence
            self.checkpointer.go_on_after(begun_after(folder.begun, world.ranks, newest_sequence))
        self.pulse = Pulse(world.ranks.pulse_file, world.ranks.local_rank, config.resilience)
        self.skipped = SkippedSamples(folder.skipped)
        self.saved_step = -1
        self._build(fill=not self._may_resume())
        self.best = BestWeights(folder.root / BEST, config.evaluate)

    def _open_data(self) -> Loaders:
        try:
            return open_data(self.config)
        except DataError as error:
            data = self.config.data
            far = any(map(is_remote, (data.path, data.valid_path, data.test_path, *data.blend)))
            # What was there once, or is far away, may come back. A mistake in the first command does not.
            if far or read_last_step(self.folder.metrics) >= 0:
                raise
            raise NothingToReadError(error.message, error.hint) from None

    def _build(self, fill: bool) -> None:
        """Model, optimizer and step. A state that is about to be loaded needs no first weights to `fill` them with."""
        seed_everything(self.config.seed, self.world.ranks.rank)
        learner = build_learner(self.config, self.grid, self.world.device, fill=fill)
        self.filled, self.origin, self.model = fill, learner.origin, learner.model
        self.step = learner.step
        self.state = TrainState(learner.model, learner.optimizers, learner.scaler, self.clock)
        self.keeper = Keeper(self.world.ranks.memory_files, self.config.resilience, self.state, self.world.device)

    def go(self, stop: StopFlag, planner: Planner | None) -> None:
        """Resume where a checkpoint allows it, then train."""
        self.stop = stop
        self._introduce()
        self._resume()
        # Not before: a state that does not fit these settings is still that of the settings in the folder.
        self._describe(planner)
        if self.clock.step and self.clock.reached(self.config.max_duration):
            # Else whoever gives a finished run's name to other data or settings takes `done` for theirs.
            self.recorder.note(
                f"notice: nothing is left to train: step {self.clock.step} is the end by max_duration "
                f"({self.config.max_duration}); a longer one goes on, another name begins anew"
            )
        feed = StepFeed(
            self.loaders.train,
            at=self.clock.samples,
            global_batch=self.config.global_batch,
            microbatch=self.config.microbatch,
            rank=self.data_rank,
            ranks=self.data_ranks,
            prefetch=self.config.data.prefetch,
            uneven=self.config.reproducible == "elastic",
            skipped=self.skipped.ranges,
        )
        rank, device = self.world.ranks.rank, self.world.device
        profiler = Profiler(self.config.profile, self.folder.profile, rank, device, self.clock.step)
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
            ensure_saved=self.ensure_saved,
            pulse=self.pulse,
            keep_due=lambda: self.keeper.due(self.clock),
            keep=self._keep,
            chaos=Chaos.from_environment(self.world.ranks.rank),
            guard=Guard(self.config.guard, scaled=self.state.scaler.enabled),
            moment=self.state.moment,
            return_to=self.state.return_to,
            recheck=self.recheck,
            enough=lambda: self.best.enough,
            saved_step=self.saved_step,
        )
        rewind = None
        if self.config.guard.rolls_back and not self.keeper.active:
            rewind = Rewind(self.state, self.config.guard.keep_interval)
            parts.remember = rewind.keep
        parts.go_back = partial(self._go_back, rewind, feed)
        if parts.chaos is not None:
            self.step.poison = partial(self._poisoned, parts.chaos)
        self.checkpointer.prepare(self.state.tensors())
        outcome = "fault"
        try:
            with profiler:
                run_loop(parts, self.config)
            # Together while all are well; closing must not wait for a process that is gone.
            self.checkpointer.wait()
            outcome = "finish"
        except StopRequested:
            # Whichever process was asked: on several nodes it may be one that has nothing to tell.
            outcome = "stop"
            raise
        finally:
            feed.close()
            self.keeper.close()
            self.checkpointer.close()
            self.best.close()
            outcome = "stop" if stop.requested and outcome != "finish" else outcome
            if outcome != "fault" or not self.world.ranks.supervised:
                # An agent tells of faults itself: it knows those of processes that can say nothing any more.
                self.recorder.event(outcome, step=self.clock.step)
            self.recorder.close()

    def save(self, durable: bool) -> None:
        """Save the step just done: behind training, or so that it is on disk when this returns."""
        if durable:
            self.saver.check_grace(self.clock.step, self.stop, self.config.resilience.grace_s)
        metadata: dict[str, Any] = {"keepstep": __version__, "torch": torch.__version__}
        metadata |= {"world_size": self.world.ranks.world_size, "loss": self.recorder.last_loss}
        state = {**self.state.tensors(), **self._values()}
        self.saver.save(self.clock.step, state, {**metadata, "config": dump_config(self.config)}, durable)

    def ensure_saved(self) -> None:
        """Return with the step just done on disk; its save may be under way already."""
        self.checkpointer.wait()
        newest, _ = self.checkpointer.last_committed or (-1, 0.0)
        if self.clock.step not in (newest, self.saved_step):
            self.save(durable=True)

    def _keep(self) -> None:
        """Keep the step just done in memory, with its numbers."""
        self.keeper.keep(self.clock.step, self._values())

    def _values(self) -> dict[str, Any]:
        """What goes with the tensors of a state."""
        return {
            "numbers": self.state.numbers(),
            "tail": list(self.recorder.tail),
            "best": self.best.state(),
            "order": self.loaders.train.order_facts,
            "origin": self.origin,
        }

    def _before_update(self) -> None:
        """Weights are about to change: whoever copies them must have them first."""
        self.keeper.before_update()
        self.saver.before_update()

    def _poisoned(self, chaos: Chaos) -> bool:
        return chaos.poisoned(self.clock.step + 1)

    def _go_back(self, rewind: Rewind | None, feed: StepFeed, reading: Reading, leave_out: bool) -> bool:
        """Back to the last good state; without the samples of this step where they are to be left out."""
        kept = None if rewind is not None else self.keeper.newest(before=reading.step)
        if rewind is None and kept is None:
            return False
        if leave_out:
            # Written down first, so that it stays so.
            self.skipped.add(reading.first_sample, reading.count, reading.step)
        elapsed_s = self.clock.elapsed_s
        if rewind is not None:
            rewind.restore(before=reading.step)
        elif kept is not None:
            self.keeper.restore(kept)
        # Time spent stays spent.
        self.clock.elapsed_s = elapsed_s
        feed.rewind(self.clock.samples, self.skipped.ranges)
        return True

    def recheck(self) -> None:
        """Let every process compute the same micro batch; a HardwareError names those whose bits differ."""
        first = max(0, self.clock.samples - self.config.global_batch)
        batch = self.loaders.train.rows(first, self.config.microbatch)
        self.state.model.eval()
        compare_bits(self.step.evaluate, batch, self.grid, partial(self.recorder.event, "fault", step=self.clock.step))
        self.state.model.train()

    def evaluate(self) -> bool:
        """Validation loss, and what the model writes after the run's prompts; False where a stop cut that off."""
        started = time.perf_counter()
        result = None
        if self.loaders.valid is not None:
            result = self._validate(self.loaders.valid)
            if result is None:
                return False
        elif self.prompts is None:
            self.recorder.note("no validation data: evaluation is skipped")
            return True
        self._go_on_from_prompts()
        self.recorder.event("evaluate", step=self.clock.step, seconds=time.perf_counter() - started)
        if result is not None:
            self._offer_best(result)
        return True

    def _go_on_from_prompts(self) -> None:
        if self.prompts is None:
            return
        self.state.model.eval()
        for prompt, text in self.prompts.continued(self.model, self.world.device, lambda: self.stop.requested):
            self.recorder.sample(self.clock.step, prompt, text)
        self.state.model.train()

    def _validate(self, valid: Loader) -> PerplexityResult | None:
        """Validation loss over the first rows of the validation data; None where somebody asked to stop meanwhile."""
        wanted = self.config.evaluate.batches * self.config.global_batch
        rows = ValidationRows(
            loader=valid,
            rows=min(wanted, valid.samples_per_epoch),
            microbatch=self.config.microbatch,
            data_rank=self.data_rank,
            data_ranks=self.data_ranks,
        )
        self.state.model.eval()
        result = validate(self.step.evaluate, rows, self.world.device, lambda: self.stop.requested)
        self.state.model.train()
        if result is None:
            self.recorder.note(f"step {self.clock.step}: asked to stop, so validation is left for another time")
            return None
        self.recorder.validated(self.clock.step, result)
        return result

    def _offer_best(self, result: PerplexityResult) -> None:
        try:
            kept = self.best.offer(self.clock.step, result.loss, self.state.weights, self.origin)
        except CheckpointError as error:
            # A full disk, say. The run is worth more than this copy, and its own saves go on.
            self.recorder.event("warning", step=self.clock.step, reason="best_failed", message=error.message)
            self.recorder.note(f"warning: the best weights so far are not kept: {error.message}")
            return
        if kept:
            self.recorder.note(f"step {self.clock.step}: the lowest validation loss so far, weights kept as {BEST}")

    def _may_resume(self) -> bool:
        """Whether a state seems to be there to go on from; the same on every process."""
        on_disk = self.checkpointer.find() is not None
        found = torch.tensor(float(on_disk or holds_step(self.world.ranks.memory_files)))
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def _resume(self) -> None:
        """Go on from memory or from a checkpoint, whichever is newer; else begin."""
        self.recorder.event("start", step=0, world_size=self.world.ranks.world_size, restarts=self.world.ranks.restarts)
        if self._resume_from_memory() or self._resume_from_disk():
            return
        self._begin_best()
        if not self.filled:
            # What seemed to be there does not fit: begin after all.
            self._build(fill=True)

    def _resume_from_disk(self) -> bool:
        settings = self.config.checkpoint
        self.checkpointer.find()
        begins = self.checkpointer.begins
        weights_only = settings.skip_optimizer and begins
        into = self.state.tensors()
        if weights_only:
            into = {"model": into["model"]}
        loaded = self.checkpointer.load_newest(into)
        if loaded is None:
            return False
        if begins:
            self._begin_best()
        if weights_only:
            self.state.optimizers.adopt(into["model"])
            self.recorder.note(f"weights from {loaded.where.name}; optimizer, schedule and data start afresh")
        else:
            self.state.adopt(loaded.values["numbers"], into)
            self._resumed(loaded.where.name, loaded.values)
        if not begins:
            self.saved_step = loaded.step
            if settings.resume_from and settings.autoresume:
                note = f"the run began at {settings.resume_from}; checkpoint.autoresume=false would begin there again"
                self.recorder.note(note)
        return True

    def _begin_best(self) -> None:
        aside = self.best.begin(self.world.is_first)
        if aside is not None:
            self.recorder.note(f"the best weights that an earlier run of this name kept are in {aside} now")

    def _resume_from_memory(self) -> bool:
        """Go on from what the agent's memory holds, where that is newer than every checkpoint."""
        step = self.keeper.newest()
        newest = self.checkpointer.find()
        # Steps elsewhere count for nothing here: this memory is newer than where the run began.
        if step is None or (newest is not None and not self.checkpointer.begins and newest.step > step):
            return False
        if newest is not None and not self.checkpointer.begins:
            self.saved_step = newest.step
        values = self.keeper.restore(step)
        self._resumed("memory", values)
        return True

    def _resumed(self, source: str, values: Mapping[str, Any]) -> None:
        if self.world.is_first:
            recorded = read_last_step(self.folder.metrics)
            tail = [line for line in values.get("tail", []) if line["step"] <= self.clock.step]
            self.recorder.complete(tail, recorded)
        if "best" in values:
            self.best.restore(values["best"])
        self._restore_origin(values.get("origin"))
        self.recorder.event("resume", step=self.clock.step, folder=source)
        self.recorder.note(f"resumed at step {self.clock.step} from {source}")
        before, now = values.get("order"), self.loaders.train.order_facts
        if before is not None and before != now:
            self.recorder.note(
                f"notice: the order of the data changed ({changed_order(before, now)}): sample {self.clock.samples:,} "
                "is another row now, so some rows come twice and some not at all; for one unbroken stream give the run "
                "the data it began with"
            )

    def _restore_origin(self, origin: Origin | None) -> None:
        """Adapters go on over the weights they began with, though the folder may hold others by now."""
        if origin is None:
            return
        if self.config.lora.rank and origin != self.origin:
            fill_from(self.model, Path(self.config.finetune.start_from), origin)
        self.origin = origin

    def _open_recorder(self, dtype: torch.dtype) -> Recorder:
        config, device = self.config, self.world.device
        tokens_per_step = config.global_batch * config.model.seq_len
        # Only the first process tells of MFU, and a restarted one knows the rate of its machine already.
        known = self.known_facts.get("peak_flops")
        peak = (known or device_peak_flops(device, dtype)) if self.world.is_first else None
        whole_peak = peak * self.world.ranks.world_size if peak else None
        rates = Rates.of(config.model, tokens_per_step, whole_peak, config.optimizer.lr, frozen=config.lora.rank > 0)
        sinks = build_sinks(self.folder, config.observe, self.world.ranks, tracked(config))
        if not self.world.is_first:
            return Recorder(config.observe, rates, sinks, None, device)
        progress = Progress(self.clock.pace.steps(config.max_duration) or 0, tokens_per_step)
        return Recorder(config.observe, rates, sinks, progress, device)

    def _introduce(self) -> None:
        config = self.config
        self.recorder.note(
            f"{config.name}: {config.model.preset} {format_count(parameter_count(config.model))} parameters on "
            f"{self.world.ranks.world_size} × {device_name(self.world.device)}, "
            f"{format_count(config.global_batch * config.model.seq_len)} tokens a step, until {config.max_duration}"
        )
        steps, warmup = (self.clock.pace.steps(item) for item in (config.max_duration, config.schedule.warmup))
        if steps and warmup and warmup > steps:
            self.recorder.note(
                f"notice: schedule.warmup ({warmup}ba) is longer than the run ({steps}ba): the learning rate ends at "
                f"{steps / warmup:.0%} of optimizer.lr; schedule.warmup=1ba rises at once, and a smaller global_batch "
                "makes more steps of the same data"
            )

    def _describe(self, planner: Planner | None) -> None:
        if not self.world.is_first:
            return
        config = self.config
        write_atomic(self.folder.config, dump_config(config))
        if self.loaders.tokenizer is not None:
            keep_tokenizer(self.loaders.tokenizer, self.folder.root / TOKENIZER, config.chat.template)
        if not self.known_facts:
            write_json(self.folder.facts, facts_of(config, self.world, self.loaders, planner))
