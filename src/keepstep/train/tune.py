"""Measure the plan's best settings on this device and keep the fastest: micro batch, recomputation, chunks, kernels.

The plan orders micro batches and recomputation by its predicted time and leaves out what cannot fit. The first of them
are measured. Then single settings of the fastest are changed, one after the other, and kept where they help.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, HardwareError, PreflightError, UsageError
from keepstep.core.ranks import from_environment
from keepstep.parallel.world import choose_device
from keepstep.plan.calibrate import calibrate, shipped_runs
from keepstep.plan.cluster import GIB, cluster_from
from keepstep.plan.memory import loss_chunks, plan_memory
from keepstep.plan.search import MICROBATCHES, choose_recompute
from keepstep.plan.speed import plan_speed
from keepstep.plan.workload import Workload, is_valid, workload_of
from keepstep.resilience.failure_cause import classify
from keepstep.train.bench import bench_step
from keepstep.train.device import describe_machine

Settings = Mapping[str, str]
"""Fields of the run's configuration and their values, as overrides write them."""
_WARMUP = 2
_NO_MEMORY = "out of memory"
_WORTHWHILE = 1.01
"""A change of one setting counts from here on: less is the noise of a short trial."""


@dataclass(frozen=True)
class Trial:
    """One set of settings, with what the plan says and what was measured."""

    settings: Settings
    planned_gib: float
    planned_tokens_per_s: float
    tokens_per_s: float = 0.0
    """0 where the trial failed."""
    peak_memory_gib: float = 0.0
    failure: str = ""

    @property
    def overrides(self) -> list[str]:
        """The settings as words of a command."""
        return [f"{name}={value}" for name, value in self.settings.items()]


def tune(
    configured: Callable[[Settings], RunConfig], most: int, steps: int, report: Callable[[str], None]
) -> Iterator[Trial]:
    """Measure at most `most` settings from the plan and a few changes of the best, each as it is done.

    `configured` gives the run with these settings, and raises a ConfigError where they do not go together. A trial that
    runs out of memory, or whose kernels or compiler fail, is one that failed.
    """
    if from_environment().world_size > 1:
        raise UsageError(
            "--tune measures in one process", "run it without a launcher; `keepstep plan --search` compares layouts"
        )
    device = choose_device(configured({}).compute.device, 0)
    trials: list[Trial] = []

    def measure(planned: Trial) -> Trial:
        tried = _measured(planned, configured, steps)
        trials.append(tried)
        outcome = tried.failure or f"{tried.tokens_per_s:,.0f} tokens/s, {tried.peak_memory_gib:.1f} GiB"
        report(f"trial {len(trials)}: {' '.join(tried.overrides)}: {outcome}")
        return tried

    planned = sorted(_planned(configured, device), key=lambda trial: -trial.planned_tokens_per_s)
    report(f"{len(planned)} settings fit by the plan; measuring {min(most, len(planned))}")
    for candidate in planned[:most]:
        yield measure(candidate)
    for name, value in _changes(configured({}), device):
        best = fastest(trials)
        if best is None:
            break
        changed = _planned_trial({**best.settings, name: value}, configured, device)
        if changed is not None and changed.settings not in [trial.settings for trial in trials]:
            yield measure(changed)
    if fastest(trials) is None:
        failures = {trial.failure for trial in trials} - {_NO_MEMORY}
        if failures:
            raise HardwareError(f"all trials failed: {min(failures)}", "keepstep bench step without --tune shows where")
        raise HardwareError("none of the trials fits this device", "keepstep plan --search, or a larger device")


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """The fastest trial; one with more settings must be faster by more than noise."""
    best: Trial | None = None
    for trial in sorted(trials, key=lambda each: len(each.settings)):
        margin = _WORTHWHILE if best is not None and len(trial.settings) > len(best.settings) else 1.0
        if trial.tokens_per_s > (best.tokens_per_s * margin if best else 0.0):
            best = trial
    return best


def _planned(configured: Callable[[Settings], RunConfig], device: torch.device) -> Iterator[Trial]:
    """Each micro batch with the recomputation that is fastest by the plan, and with full recomputation."""
    rows = configured({}).global_batch
    for microbatch in (each for each in MICROBATCHES if rows % each == 0):
        chosen: Settings = {"microbatch": str(microbatch), "compute.recompute": "auto"}
        trials = [_planned_trial(chosen, configured, device)]
        trials.append(_planned_trial({**chosen, "compute.recompute": "full"}, configured, device))
        seen: list[Settings] = []
        for trial in trials:
            if trial is not None and trial.settings not in seen:
                seen.append(trial.settings)
                yield trial


def _planned_trial(
    settings: Settings, configured: Callable[[Settings], RunConfig], device: torch.device
) -> Trial | None:
    """What the plan says; None where the settings do not go together or do not fit."""
    try:
        config = configured(settings)
    except ConfigError:
        return None
    machine = describe_machine(config, device, 1, 1)
    cluster = cluster_from(machine)
    factors = calibrate(shipped_runs(), cluster)
    work = workload_of(config, 1, machine.precision, machine.memory_bytes)
    if config.compute.recompute == "auto":
        # Without a GPU the run recomputes nothing.
        work = choose_recompute(work, cluster, factors) if device.type == "cuda" else replace(work, recompute="none")
        settings = _settled(settings, work)
    memory = plan_memory(work)
    if not is_valid(work) or memory.needed > machine.memory_bytes:
        return None
    return Trial(settings, memory.allocated / GIB, plan_speed(work, cluster, factors).tokens_per_s)


def _settled(settings: Settings, work: Workload) -> Settings:
    """A mixture of modes stays `auto`, which chooses it again; a single mode is named."""
    modes = set(work.modes)
    return settings if len(modes) > 1 else {**settings, "compute.recompute": modes.pop()}


def _changes(config: RunConfig, device: torch.device) -> Iterator[tuple[str, str]]:
    """Settings to try on the best trial, each with another value than the run's."""
    work = workload_of(config, 1)
    automatic = loss_chunks(replace(work, device_bytes=describe_machine(config, device, 1, 1).memory_bytes))
    for chunks in sorted({1, 2 * automatic, 4 * automatic} - {config.compute.loss_chunks or automatic}):
        yield "compute.loss_chunks", str(chunks)
    if device.type == "cuda":
        # Without a GPU there is one form of the matmuls, and compiling takes longer than it saves.
        yield "compute.fused_matmuls", str(not config.compute.fused_matmuls).lower()
        # `auto` compiles what it can.
        yield "compute.compile", str(config.compute.compile is False).lower()


def _measured(planned: Trial, configured: Callable[[Settings], RunConfig], steps: int) -> Trial:
    _free_memory()
    try:
        result = bench_step(configured(planned.settings), steps, warmup=_WARMUP, breakdown=False)
    except (PreflightError, RuntimeError, MemoryError) as error:
        # Compilers and kernels fail with a RuntimeError as well: the other settings may still run.
        first_line = next(iter(str(error).splitlines()), "")
        no_room = isinstance(error, PreflightError) or classify(error) == "oom"
        failure = _NO_MEMORY if no_room else f"{type(error).__name__}: {first_line}"
    else:
        return replace(planned, tokens_per_s=result.tokens_per_s, peak_memory_gib=result.peak_memory_gib)
    # Outside the handler: the error holds the frames that hold the tensors.
    _free_memory()
    return replace(planned, failure=failure)


def _free_memory() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
