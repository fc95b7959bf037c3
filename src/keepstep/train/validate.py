"""Validation loss over the same rows each time, so that its numbers can be compared along the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.data.loader import Batch, Loader
from keepstep.evaluate.perplexity import PerplexityResult, exponential


@dataclass(frozen=True)
class ValidationRows:
    """Which rows, and how this process shares them with the others."""

    loader: Loader
    rows: int
    microbatch: int
    data_rank: int
    data_ranks: int


def validate(
    forward: Callable[[Batch], tuple[Tensor, int]],
    share: ValidationRows,
    device: torch.device,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> PerplexityResult | None:
    """Every process computes its rows; all of them return the same result.

    `forward` gives the sum of losses and the targets it is a sum over; of processes that compute one together, on one.
    None where a process was asked to stop on the way: a validation may take longer than a scheduler waits.
    """
    # A place for each micro batch and one sum in order: the same bits however many processes share the work.
    totals = torch.zeros(2, -(-share.rows // share.microbatch), dtype=torch.float64, device=device)
    stride = share.microbatch * share.data_ranks
    with torch.no_grad():
        # All processes run the same number of forwards (sharded weights are gathered together); rows past the end
        # are computed by nobody twice: they carry no weight.
        for start in range(0, share.rows, stride):
            stop = torch.tensor(float(asked_to_stop()))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                return None
            first = start + share.data_rank * share.microbatch
            count = max(0, min(share.microbatch, share.rows - first))
            batch = share.loader.rows(min(first, share.rows - 1), max(1, count))
            loss_sum, targets = forward(batch)
            if count:
                number = first // share.microbatch
                totals[0, number] = loss_sum
                totals[1, number] = targets
    dist.all_reduce(totals)
    loss_sum_all, targets_all = totals.sum(dim=1).tolist()
    loss = loss_sum_all / max(1.0, targets_all)
    return PerplexityResult(loss, exponential(loss), int(targets_all))
