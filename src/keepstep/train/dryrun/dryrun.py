"""Build and step the real model at its full number of processes on one CPU, with fake tensors and a fake group.

One process of each kind (a pipeline's first, second and last stage) is simulated in turn: shapes, shards, schedules and
collectives are those of the run; only the numbers inside tensors and the bytes on the wire are missing.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from keepstep.config.schema import RunConfig
from keepstep.core.errors import KeepstepError
from keepstep.data.batch import Batch
from keepstep.models.ops.backend import use_backend
from keepstep.parallel.mesh import build_mesh
from keepstep.plan.memory import stage_memory
from keepstep.plan.network import StepBytes, step_bytes
from keepstep.plan.tensors import stage_parameters
from keepstep.plan.workload import Workload
from keepstep.train.build import fill_learner, spread_model
from keepstep.train.dryrun.fake_gpu import GpuOnFakeTensors, StepTrace, replaced

_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"


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
    """All processes that were simulated."""

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


def dry_run(config: RunConfig, work: Workload) -> DryRun:
    """Simulate the first process of the run's first, second and last stage."""
    compute = replace(config.compute, device="cpu", compile=False)
    settled = replace(config, precision=work.precision, lora=config.adapters, compute=compute)
    last = work.degrees.pipeline - 1
    stages = sorted({0, min(1, last), last})
    # A process each: torch remembers meshes of groups that are gone. From a fork server, which imports torch once for
    # all of them; threads do not survive a fork, so the numeric libraries must not start any there.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, _FAKE_GROUP])
    workers = min(len(stages), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        simulated = [pool.submit(_simulate_safely, settled, work, stage) for stage in stages]
        return DryRun(work.degrees.world_size, [each.result() for each in simulated])


def _simulate_safely(config: RunConfig, work: Workload, stage: int) -> StageTrace:
    """Simulate, and return a failure as text: torch's own errors cannot be pickled."""
    try:
        return _simulate(config, work, stage)
    except KeepstepError:
        raise
    except Exception:
        raise RuntimeError(f"the dry run of stage {stage} failed:\n{traceback.format_exc()}") from None


def _simulate(config: RunConfig, work: Workload, stage: int) -> StageTrace:
    rank = stage * (work.degrees.world_size // work.degrees.pipeline)
    started = time.perf_counter()
    torch.set_num_threads(1)
    trace = StepTrace()
    rows = np.zeros((config.microbatch, config.model.seq_len), dtype=np.int64)
    batches = [Batch(rows, rows, None, None, 0)] * work.microbatches
    device = torch.device("cpu")
    backend = GpuOnFakeTensors(work.device_bytes)
    with _fake_world(rank, work.degrees.world_size), use_backend(backend), _known_shapes():
        # Meshes read their own small tensors, so the model is split before tensors are fake.
        mesh = build_mesh(work.degrees, "cpu")
        spread = spread_model(config, mesh, device, work.modes)
        with FakeTensorMode(allow_non_fake_inputs=True), trace.following():
            learner = fill_learner(config, mesh, device, spread)
            trace.reset_peak()
            learner.step.run(batches, lr_share=1.0)
    kinds = (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "send",
        *(("all_to_all",) if work.degrees.expert > 1 else ()),
    )
    return StageTrace(
        stage=stage,
        rank=rank,
        predicted_bytes=stage_memory(work, stage).allocated,
        traced_bytes=trace.peak_bytes,
        at=trace.peak_operation,
        predicted_traffic=step_bytes(work, stage_parameters(work, stage), stage),
        traced_traffic=StepBytes(*(trace.collective_bytes[kind] for kind in kinds)),
        operations=trace.operations,
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A process group of any size in which every collective returns immediately."""
    # Its import alone makes torch know the backend.
    store = import_module(_FAKE_GROUP).FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _known_shapes() -> Iterator[None]:
    """Before its first step a pipeline asks all stages whether shapes are known; nobody else is there to answer."""
    from torch.distributed.pipelining import schedules

    mode = getattr(schedules, "InferenceMode", None)
    if mode is None:
        yield
        return

    def agree(_schedule: object, stages: list[Any], *_args: object) -> None:
        for stage in stages:
            stage._inference_mode = mode.STATIC

    with replaced(schedules._PipelineSchedule, "_warmup_p2p", agree):
        yield
