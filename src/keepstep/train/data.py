"""The run's data: loaders for training and validation rows, and the feed of this process's micro batches."""

from __future__ import annotations

from keepstep.core.errors import DataError, NothingToReadError
from keepstep.data.loader import Loaders
from keepstep.data.step_feed import StepFeed
from keepstep.interop.run_data import open_run_data
from keepstep.observe.run_folder import read_last_step
from keepstep.train.context import RunContext
from keepstep.train.recovery.skipped_samples import SkippedSamples


def open_data(context: RunContext) -> Loaders:
    """Open what the run reads. NothingToReadError where another attempt would fail the same way."""
    try:
        return open_run_data(context.config)
    except DataError as error:
        # Data that was there before may come back. A mistake in the first command stays one, also in an address: while
        # a store is unreachable, opening waits for it and raises another error in the end.
        if read_last_step(context.folder.metrics) >= 0:
            raise
        raise NothingToReadError(error.message, error.hint) from None


def open_feed(context: RunContext, loaders: Loaders, at: int) -> tuple[StepFeed, SkippedSamples]:
    """This process's micro batches from global sample `at` on, and the samples that they skip."""
    config, mesh = context.config, context.mesh
    skipped = SkippedSamples(context.folder.skipped, lambda: context.is_first)
    feed = StepFeed(
        loaders.train,
        at=at,
        global_batch=config.global_batch,
        microbatch=config.microbatch,
        rank=mesh.data_rank if context.replica is None else context.replica.rank,
        ranks=mesh.layout.data_ranks if context.replica is None else context.replica.ranks,
        prefetch=config.data.prefetch,
        uneven=config.integer_sums,
        skipped=skipped.ranges,
    )
    return feed, skipped
