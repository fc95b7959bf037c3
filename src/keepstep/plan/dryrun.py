"""Build and step the real model at its full number of processes on one CPU, with fake tensors and a fake group.

One process of each kind (a pipeline's first, second and last stage) is played in turn: shapes, shards, schedules and
collectives are those of the run; only the numbers inside tensors and the bytes on the wire are missing.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from keepstep.config.schema import RunConfig
from keepstep.core.errors import KeepstepError
from keepstep.data.loader import Batch
from keepstep.parallel.mesh import Grid, build_grid
from keepstep.plan.memory import stage_memory
from keepstep.plan.network import StepBytes, step_bytes
from keepstep.plan.parameters import stage_parameters
from keepstep.plan.trace import StepTrace, gpu_kernels
from keepstep.plan.workload import Workload

Step = Callable[[list[Batch]], object]
"""Runs one step on a process's micro batches."""
SpreadStep = Callable[[RunConfig, Grid, torch.device], Callable[[], Step]]
"""Splits the model over processes without memory; called again, what it returns gives it memory. `train` has both."""


@dataclass(frozen=True)
class StageTrace:
    """One process's step: what the formula says, and what the trace counted."""

    stage: int
    rank: int
    predicted_bytes: int
    traced_bytes: int
    at: str
    """The operation at which the traced peak came."""
    predicted_traffic: StepBytes
    traced_traffic: StepBytes
    operations: int
    seconds: float

    @property
    def memory_error(self) -> float:
        """(predicted - traced) / traced."""
        return self.predicted_bytes / self.traced_bytes - 1

    @property
    def traffic_error(self) -> float | None:
        """The same for the bytes of all collectives; None where there are none."""
        traced = self.traced_traffic.total
        if traced < 2**20:
            # Loss, norm and counts are always summed: a few numbers.
            return None
        return self.predicted_traffic.total / traced - 1


@dataclass(frozen=True)
class DryRun:
    """All processes that were played."""

    world_size: int
    stages: list[StageTrace]

    def as_values(self) -> dict[str, Any]:
        """For JSON."""
        lines = [
            {**asdict(each), "memory_error": each.memory_error, "traffic_error": each.traffic_error}
            for each in self.stages
        ]
        return {"world_size": self.world_size, "stages": lines}

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        seconds = sum(each.seconds for each in self.stages)
        yield f"dry run   {self.world_size} processes on one CPU, {seconds:.0f} s: formula against trace"
        for each in self.stages:
            planned, traced = each.predicted_traffic.total / 2**30, each.traced_traffic.total / 2**30
            error = "" if each.traffic_error is None else f" ({each.traffic_error:+.1%})"
            yield (
                f"  stage {each.stage:<3} {each.predicted_bytes / 2**30:8.2f} GiB, "
                f"traced {each.traced_bytes / 2**30:8.2f} ({each.memory_error:+.1%}); "
                f"collectives {planned:8.2f} GiB, traced {traced:8.2f}{error}"
            )


def dry_run(config: RunConfig, work: Workload, spread_step: SpreadStep) -> DryRun:
    """Play the first process of the run's first, second and last stage; `spread_step` must be a module's function."""
    settled = replace(config, precision=work.precision, compute=replace(config.compute, device="cpu", compile=False))
    last = work.degrees.pipeline - 1
    stages = sorted({0, min(1, last), last})
    # A process each: torch remembers meshes of groups that are gone. Spawned, as torch's threads do not survive a fork.
    workers = min(len(stages), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        played = [pool.submit(_tell, settled, work, stage, spread_step) for stage in stages]
        return DryRun(work.degrees.world_size, [each.result() for each in played])


def _tell(config: RunConfig, work: Workload, stage: int, spread_step: SpreadStep) -> StageTrace:
    """Play, and let a failure travel as text: torch's own errors hold what no other process can be sent."""
    try:
        return _play(config, work, stage, spread_step)
    except KeepstepError:
        raise
    except Exception:
        raise RuntimeError(f"the dry run of stage {stage} failed:\n{traceback.format_exc()}") from None


def _play(config: RunConfig, work: Workload, stage: int, spread_step: SpreadStep) -> StageTrace:
    rank = stage * (work.degrees.world_size // work.degrees.pipeline)
    started = time.perf_counter()
    torch.set_num_threads(1)
    trace = StepTrace()
    rows = np.zeros((config.microbatch, config.model.seq_len), dtype=np.int64)
    batches = [Batch(rows, rows, None, None, 0)] * work.microbatches
    with _fake_world(rank, work.degrees.world_size), gpu_kernels(work.device_bytes), _known_shapes():
        # Meshes look at their own small tensors, so all that asks them comes before tensors are fake.
        fill = spread_step(config, build_grid(work.layout, "cpu"), torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True), trace.following():
            step = fill()
            trace.reset_peak()
            step(batches)
    return StageTrace(
        stage=stage,
        rank=rank,
        predicted_bytes=stage_memory(work, stage).allocated,
        traced_bytes=trace.peak_bytes,
        at=trace.peak_operation,
        predicted_traffic=step_bytes(work, stage_parameters(work, stage), stage),
        traced_traffic=_traffic(trace),
        operations=trace.operations,
        seconds=time.perf_counter() - started,
    )


def _traffic(trace: StepTrace) -> StepBytes:
    counted = trace.collective_bytes
    return StepBytes(counted["all_gather"], counted["reduce_scatter"], counted["all_reduce"], counted["send"])


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A process group of any size in which every collective is over at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _known_shapes() -> Iterator[None]:
    """Before its first step a pipeline asks all stages whether shapes are known; no one is there to answer yes."""
    from torch.distributed.pipelining import schedules

    mode = getattr(schedules, "InferenceMode", None)
    if mode is None:
        yield
        return

    def agree(_schedule: object, stages: list[Any], *_args: object) -> None:
        for stage in stages:
            stage._inference_mode = mode.STATIC

    with mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agree):
        yield
