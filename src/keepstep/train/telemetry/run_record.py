"""What a run reports at its start: its recorder, a headline on the terminal, its configuration and facts on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepstep.config.dump import dump_config
from keepstep.core.callbacks import Callback
from keepstep.core.files import write_atomic, write_json
from keepstep.core.units import Pace, format_count, format_seconds
from keepstep.data.chat.tokenizer import copy_tokenizer
from keepstep.data.loader import Loaders
from keepstep.interop.run_source import TOKENIZER_FOLDER
from keepstep.models.size import parameter_count
from keepstep.observe.run_folder import read_last_step
from keepstep.observe.screen import Progress
from keepstep.observe.sinks.metric_sinks import MetricSinks, build_sinks
from keepstep.train.context import RunContext
from keepstep.train.device import compute_dtype, device_name, known_peak_flops, speed_notice
from keepstep.train.recovery.storage_wait import wait_for_room
from keepstep.train.telemetry.facts import collect_facts, known_facts, tracked
from keepstep.train.telemetry.recorder import Rates, Recorder
from keepstep.train.telemetry.run_callbacks import RunCallbacks

Callbacks = Sequence[Callback]
"""Those that a program passes, next to those of the configuration."""
LONG_STEP_S = 10.0
"""Steps from this on are announced before the first one."""


class RunRecord:
    """The run's recorder, and what is written once at the start."""

    def __init__(self, context: RunContext, loaders: Loaders, pace: Pace, callbacks: Callbacks) -> None:
        self._context, self._loaders, self._pace = context, loaders, pace
        self._callbacks = RunCallbacks(context.config, callbacks, is_first=context.is_first)
        self._known_facts = known_facts(context.folder, context.world.ranks)
        self.recorder = self._open_recorder()

    def _open_recorder(self) -> Recorder:
        context, config, device = self._context, self._context.config, self._context.world.device
        tokens_per_step = config.global_batch * config.model.seq_len
        # Only the first process reports MFU.
        peak = known_peak_flops(device, compute_dtype(config.precision, device)) if context.is_first else None
        whole_peak = peak * context.processes if peak else None
        rates = Rates.of(config.model, tokens_per_step, whole_peak, config.optimizer.lr, frozen=config.lora.rank > 0)
        sinks, progress = self._open_outputs()
        return Recorder(config.observe, rates, sinks, progress, device, self._loaders.positions, self._callbacks)

    def lead(self) -> None:
        """This process writes for all from now on."""
        context = self._context
        leads = replace(context, world=replace(context.world, ranks=replace(context.world.ranks, leads=True)))
        self._context = leads
        sinks, progress = self._open_outputs()
        self.recorder.lead(sinks, progress, read_last_step(context.folder.metrics))

    def _open_outputs(self) -> tuple[MetricSinks | None, Progress | None]:
        """Sinks for this process; the first one also has the progress line."""
        context, config = self._context, self._context.config
        sinks = build_sinks(context.folder, config.observe, context.world.ranks, tracked(config))
        steps, tokens_per_step = self._pace.steps(config.max_duration) or 0, config.global_batch * config.model.seq_len
        return sinks, Progress(steps, tokens_per_step) if context.is_first else None

    def announce(self) -> None:
        """Print what is about to run, what looks like a mistake in its schedule, and what slows it down."""
        config, world = self._context.config, self._context.world
        self.recorder.note(
            f"{config.name}: {config.model.preset} {format_count(parameter_count(config.model))} parameters on "
            f"{self._context.processes} × {device_name(world.device)}, "
            f"{format_count(config.global_batch * config.model.seq_len)} tokens a step, until {config.max_duration}"
        )
        if self._context.microbatch_line:
            self.recorder.note(self._context.microbatch_line)
        steps, warmup = (self._pace.steps(item) for item in (config.max_duration, config.schedule.warmup))
        if steps and warmup and warmup > steps:
            self.recorder.note(
                f"notice: schedule.warmup ({warmup}ba) is longer than the run ({steps}ba): the learning rate ends at "
                f"{steps / warmup:.0%} of optimizer.lr; set schedule.warmup=1ba, or a smaller global_batch for more "
                "steps of the same data"
            )

        if notice := speed_notice(config, world.device):
            self.recorder.note(notice)

    def write_description(self) -> None:
        """Write configuration, tokenizer and facts into the run's folder."""
        if self._context.is_first:
            context = self._context
            retry_s, folder = context.config.checkpoint.retry_s, context.folder.root
            wait_for_room(retry_s, folder, context.stop, self._write_description, self.recorder.note)
            self._announce_long_step()

    def _write_description(self) -> None:
        config, folder, loaders = self._context.config, self._context.folder, self._loaders
        write_atomic(folder.config, dump_config(config))
        if loaders.tokenizer is not None:
            copy_tokenizer(loaders.tokenizer, folder.root / TOKENIZER_FOLDER, config.chat.template)
        if not self._known_facts:
            self._known_facts = collect_facts(config, self._context.world, loaders)
            write_json(folder.facts, self._known_facts)

    @property
    def planned_step_s(self) -> float:
        """Seconds that the plan expects of a step, on the first process; 0 where there is no plan."""
        return float(self._known_facts.get("plan", {}).get("step_s", 0.0))

    def _announce_long_step(self) -> None:
        if self.planned_step_s > LONG_STEP_S:
            config = self._context.config
            tokens = format_count(config.global_batch * config.model.seq_len)
            self.recorder.note(
                f"notice: the first step takes about {format_seconds(self.planned_step_s)} here ({tokens} tokens); "
                "a smaller global_batch makes shorter steps"
            )
