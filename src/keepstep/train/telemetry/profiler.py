"""Torch's profiler on a schedule, and a memory snapshot when a GPU runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from keepstep.config.schema import ProfileConfig
from keepstep.core.errors import HardwareError


class Profiler:
    """Writes one Chrome trace (JSON) per cycle and rank into `folder`; does nothing where `active` is 0.

    The schedule starts with each start of a run. Files are named after the run's steps, of which `done` are done.
    """

    def __init__(self, config: ProfileConfig, folder: Path, rank: int, device: torch.device, done: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self._done = done
        self._profile: profile | None = None
        if config.active:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
            self._profile = profile(
                activities=activities,
                schedule=schedule(
                    skip_first=config.skip_first,
                    wait=config.wait,
                    warmup=config.warmup,
                    active=config.active,
                    repeat=config.repeat,
                ),
                on_trace_ready=self._write,
                record_shapes=True,
                profile_memory=True,
            )

    def _write(self, finished: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        step = self._done + finished.step_num
        finished.export_chrome_trace(str(self._folder / f"trace_step{step}_rank{self._rank}.json"))

    def __enter__(self) -> Profiler:
        if self._profile:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile:
            self._profile.stop()

    def step(self) -> None:
        """One training step is done."""
        if self._profile:
            self._profile.step()


@contextmanager
def memory_snapshot_on_oom(
    config: ProfileConfig, folder: Path, rank: int, device: torch.device, microbatches: Sequence[int] = ()
) -> Iterator[None]:
    """Record allocations; when a GPU runs out of memory, write a snapshot for https://pytorch.org/memory_viz.

    `microbatches` are smaller ones that the run may have, for the error.
    """
    recording = config.memory_snapshot and device.type == "cuda"
    if recording:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        where = ""
        if recording:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"oom_rank{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            where = f"; allocations are in {path}"
        less = "".join(f"set microbatch={rows}, " for rows in microbatches)
        raise HardwareError(
            f"GPU {device.index} ran out of memory: {str(error).splitlines()[0]}",
            f"{less}set compute.recompute=full, or use more processes{where}",
        ) from error
    finally:
        if recording:
            torch.cuda.memory._record_memory_history(enabled=None)
