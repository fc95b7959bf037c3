"""Steps whose bits do not depend on the number of processes: `reproducible: elastic`.

Floating-point sums depend on their order, and the order on how many processes share them. Two things take that away:
the micro batch is the unit of work whatever the number of processes, and gradients of micro batches are added as whole
numbers. Every process then holds the same sum, bit for bit, and updates whole weights with it.

Where the replicas of a run outlive each other and each shards its weights over several processes (HSDP), the unit of
work is one micro batch for every process of a replica. FSDP adds these up in floating point, always alike; the rest is
as above, with shards in the place of whole weights. The bits then do not depend on the number of replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from keepstep.core import failpoints
from keepstep.data.batch import Batch
from keepstep.models.ops.backend import backend
from keepstep.models.transformer import Transformer
from keepstep.resilience.survivors.replica import MembershipChangedError, Replica
from keepstep.train.optim.loss_scaler import LossScaler
from keepstep.train.optim.optimizer import Optimizers
from keepstep.train.step import STOP, VOID, StepSettings, StepSignals, TrainStep, own_seconds

STEPS_PER_ONE = 2.0**50
"""Fixed-point numbers have steps of 2^-50: a gradient as small as AdamW's usual eps (1e-8) still keeps 24 bits, all
that fp32 has. What is left of 64 bits above holds numbers up to 2^13."""
LARGEST = 2.0**12
"""Largest element of a gradient, half of what fits: sums cannot wrap round. Beyond it a step is not finite."""
_ROW = 4096
_FIRST_PIECE = 1 << 22
"""Numbers converted through a copy before the rest is converted in place."""


def noise_seed(seed: int, first_sample: int) -> int:
    """What dropout and embedding noise of one micro batch draw from: its place in the data decides, no rank does."""
    return int.from_bytes(hashlib.sha256(f"{seed}:noise:{first_sample}".encode()).digest()[:8], "little") >> 1


class FixedPointSums:
    """Sums of gradients and losses over all micro batches of all processes, 8 bytes a parameter in all.

    A gradient is taken as soon as the backward pass has finished it, and freed. Losses travel in the same message, each
    in a place of its own where other processes add zero.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        microbatches: int,
        device: torch.device,
        sum_count: int = 0,
        token_counts: int = 0,
    ) -> None:
        """`sum_count`: numbers of a micro batch next to its loss. `token_counts`: numbers of tokens of experts."""
        self._parameters = list(parameters)
        self._ends = [0]
        for parameter in self._parameters:
            self._ends.append(self._ends[-1] + local(parameter).numel())
        self._size, self._microbatches = self._ends[-1], microbatches
        self._columns, self._token_counts = 1 + sum_count, token_counts
        places = microbatches * self._columns + token_counts
        self.use_memory(torch.zeros(self._size + places + 4, dtype=torch.int64, device=device))
        self._largest = torch.zeros((), device=device)
        self._untouched = set(range(len(self._parameters)))
        """Parameters without a gradient yet in this step: their first one is set, which saves a pass of zeros."""
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._taker(number))

    def use_memory(self, numbers: Tensor) -> None:
        """Add up in this memory from the next step on."""
        self._numbers = numbers
        counts = [self._microbatches * self._columns, self._token_counts, 4]
        self.tokens: Tensor
        """Tokens that each expert of each layer had."""
        losses, self.tokens, self._flags = numbers[self._size :].split(counts)
        self._losses = losses.view(self._microbatches, self._columns)

    @property
    def count(self) -> int:
        """Numbers that are summed over all processes."""
        return len(self._numbers)

    def start(self) -> None:
        """Forget the step before."""
        self._numbers[self._size :].zero_()
        self._largest.zero_()
        self._untouched = set(range(len(self._parameters)))

    def add_loss(self, microbatch: int, sums: Tensor) -> None:
        """Note the loss of one micro batch of the step and its other sums, by its number in the global batch."""
        self._losses[microbatch] = sums.float().view(torch.int32)

    def sum_losses(self) -> None:
        """Add up losses and signals over the processes that shard the weights."""
        dist.all_reduce(self._numbers[self._size :])

    def reduce(self, signals: StepSignals, sum_: Callable[[Tensor], object]) -> None:
        """Add up over all processes with `sum_`. Whole numbers: no order of adding gives another result."""
        for number in self._untouched:
            self._total(number).zero_()
        # Written so that a NaN counts as too large.
        self._flags[0] = ~(self._largest <= LARGEST / self._microbatches)
        self._flags[1] = int(signals.stop)
        self._flags[2] = round(own_seconds(signals.spent_s) * 1e6)
        self._flags[3] = int(signals.void)
        sum_(self._numbers)

    def checksum(self) -> str:
        """A hash of all sums, which are added up in rows first: that runs at the speed of memory."""
        whole = len(self._numbers) // _ROW * _ROW
        rows = self._numbers[:whole].view(-1, _ROW).sum(dim=1)
        rest = self._numbers[whole:]
        return hashlib.sha256(torch.cat([rows, rest]).cpu().numpy().tobytes()).hexdigest()

    def on_host(self) -> NDArray[np.int64]:
        """After `reduce`, before `gradients`: all sums in host memory."""
        numbers: NDArray[np.int64] = self._numbers.cpu().numpy()
        return numbers

    def load(self, numbers: NDArray[np.int64]) -> None:
        """Take over sums that `on_host` returned elsewhere."""
        self._numbers.copy_(torch.from_numpy(numbers))

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """After `reduce`: the sums over all micro batches, the loss first, whether a gradient did not fit, and the
        signals of all processes.

        That is how many asked to stop, the seconds that the first one spent, and how many parts were void.
        """
        losses = self._losses.to(torch.int32).view(torch.float32)
        asked, spent_us, void = self._flags[1:].double()
        summed = torch.stack([asked, spent_us / 1e6, void]).float()
        return losses.double().sum(dim=0), self._flags[0] > 0, summed

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """After `reduce`: fp32 gradients, in the first half of the memory that held the sums."""
        halves = self._numbers.view(torch.float32)
        first = min(_FIRST_PIECE, self._size)
        halves[:first] = self._numbers[:first] * (1 / STEPS_PER_ONE)
        # Twice as much each time: what is written ends where what is read starts.
        start = first
        while start < self._size:
            end = min(2 * start, self._size)
            torch.mul(self._numbers[start:end], 1 / STEPS_PER_ONE, out=halves[start:end])
            start = end
        return {
            parameter: _like(parameter, halves[self._ends[number] : self._ends[number + 1]])
            for number, parameter in enumerate(self._parameters)
        }

    def _total(self, number: int) -> Tensor:
        return self._numbers[self._ends[number] : self._ends[number + 1]]

    def _taker(self, number: int) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            first = number in self._untouched
            backend().add_fixed_point_(self._total(number), local(parameter.grad), self._largest, STEPS_PER_ONE, first)
            self._untouched.discard(number)
            parameter.grad = None

        return take


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """Local values in the shape of a parameter, sharded as it is."""
    shaped = values.view_as(local(parameter))
    if not isinstance(parameter, DTensor):
        return shaped
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shaped, mesh, placements, shape=parameter.shape, stride=parameter.stride())


class ElasticStep(TrainStep):
    """A step whose numbers are the same at any number of processes, or of replicas that shard their weights alike."""

    def __init__(
        self,
        model: Transformer,
        optimizers: Optimizers,
        scaler: LossScaler,
        settings: StepSettings,
        *,
        seed: int,
        microbatches: int,
    ) -> None:
        super().__init__(model, optimizers, scaler, settings)
        self._seed, self._microbatches = seed, microbatches
        sum_count, tokens = settings.objective.sum_count, self._router_tokens().numel()
        self._sums_of_step = FixedPointSums(optimizers.parameters, microbatches, settings.device, sum_count, tokens)
        self._shared: NDArray[np.int64] | None = None
        """Among replicas: memory that all of those on this node read."""
        self._step_in_flight, self._done = -1, set[int]()
        """Among replicas: a step that is not committed yet, and the micro batches whose gradients are in its sums."""
        self._overflow = torch.zeros((), dtype=torch.bool, device=settings.device)

    def run(
        self,
        batches: Sequence[Batch],
        lr_share: float,
        signals: StepSignals = StepSignals(),  # noqa: B008 - frozen
        before_update: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Learn from this process's micro batches, of which other processes may have more or fewer."""
        share = self._share()
        targets = self._total_targets(batches)
        # FSDP averages over the processes that shard the weights, or have copies of shards.
        averaged = self._settings.mesh.layout.world_size if self._is_sharded else 1
        weight = self._poisoned(averaged / targets)
        total = self._sums_of_step
        if self._starts_over(signals.step):
            total.start()
            self._done.clear()
            # Of micro batches that do not count any more.
            self._router_tokens()
        # Only among replicas may a step be tried again.
        self._step_in_flight = signals.step if self.replica is not None else -1
        most = -(-self._microbatches // self._ranks)
        for place in range(most):
            # Every process asks equally often, also one that has a micro batch less.
            if signals.abandon(place, most):
                return self._abandoned(signals)
            if place == len(share):
                break
            if self.replica is not None:
                self.replica.raise_if_changed()
            if share[place] in self._done:
                continue
            # A void step computes along with what there is.
            batch = batches[min(place, len(batches) - 1)]
            torch.manual_seed(noise_seed(self._seed, batch.first_sample))
            self._weigh_routers(weight * self.objective.count(batch))
            sums = self._sums(batch)
            torch.autograd.backward(sums[0] * weight)
            total.add_loss(share[place], sums.detach())
            self._done.add(share[place])
        total.tokens += self._router_tokens().flatten()
        total.reduce(signals, self._sum_)
        before_update()
        if self.replica is not None:
            self.replica.commit(signals.step, total.checksum())
            self.replica.relay(lambda: {"targets": int(targets), "lr_share": lr_share}, total.on_host)
        return self._apply(targets, lr_share)

    def _apply(self, targets: Tensor, lr_share: float) -> Tensor:
        """Update the weights with the sums; returns the numbers of the step."""
        if self._is_sharded:
            self._sums_of_step.sum_losses()
        sums, self._overflow, summed = self._sums_of_step.numbers()
        self._optimizers.take_gradients(self._sums_of_step.gradients())
        loss = (sums[0] / targets).float()
        norm = self._update(lr_share, loss.masked_fill(summed[VOID - STOP] > 0, torch.nan))
        if self.replica is not None:
            failpoints.reach("applied")
        metrics = self.objective.metrics(sums[1:]).float()
        return torch.stack([loss, norm, *summed, targets.float(), *metrics, *self._router_health])

    def replay(self, facts: Mapping[str, Any], sums: NDArray[np.int64]) -> None:
        """Update the weights with the sums of a step that other replicas have committed."""
        self._sums_of_step.load(sums)
        targets = torch.full((), facts["targets"], dtype=torch.int64, device=self.device)
        self._apply(targets, facts["lr_share"])

    def join(self, replica: Replica) -> None:
        """Sum over replicas: on the device, or in memory that those of this node read directly."""
        super().join(replica)
        if replica.make_group is not None:
            return
        self._shared = replica.shared_numbers(self._sums_of_step.count)
        if self.device.type == "cpu":
            self._sums_of_step.use_memory(torch.from_numpy(self._shared))

    def warm_up(self, batch: Batch) -> None:
        """Compute a micro batch for nothing but what its first time compiles and allocates."""
        torch.autograd.backward(self._sums(batch)[0])

    def _share(self) -> Sequence[int]:
        """This process's micro batches of the step, by their number in the global batch."""
        if self.replica is not None:
            return self.replica.share(self._microbatches)
        return range(self._settings.mesh.data_rank, self._microbatches, self._ranks)

    def _total_targets(self, batches: Sequence[Batch]) -> Tensor:
        own = sum(map(self.objective.count, batches))
        if self.replica is not None:
            own = self.replica.total(own)
        targets = torch.full((), own, dtype=torch.int64, device=self.device)
        if self.replica is None:
            dist.all_reduce(targets)
        return targets

    def _starts_over(self, step: int) -> bool:
        """Whether nothing that was computed for this step can be kept, here or on another process of this replica."""
        own = step != self._step_in_flight
        return own if self.replica is None else self.replica.siblings.any(own)

    def _tokens_of_step(self) -> Tensor:
        return self._sums_of_step.tokens.view(-1, max(1, self._model.config.experts.count))

    @property
    def _is_sharded(self) -> bool:
        return self._settings.mesh.layout.weight_shards > 1

    @property
    def _ranks(self) -> int:
        return self._settings.mesh.layout.data_ranks

    def _sum_(self, numbers: Tensor) -> None:
        """Add up whole numbers over all processes, in place."""
        if self.replica is None:
            # The only replica has nobody to add to its shards.
            if not self._is_sharded:
                dist.all_reduce(numbers)
            return
        shared = numbers if self._shared is None else torch.from_numpy(self._shared)
        in_place = numbers.data_ptr() == shared.data_ptr()
        if not in_place:
            shared.copy_(numbers)
        try:
            self.replica.sum_(numbers if self._shared is None else self._shared)
        except MembershipChangedError:
            if in_place and self.replica.changed_numbers:
                self._step_in_flight = -1
            raise
        if not in_place:
            numbers.copy_(shared)
        # What is there now is no longer this process's own part.
        self._step_in_flight = -1

    def _gradient_norm(self) -> Tensor:
        return super()._gradient_norm().masked_fill(self._overflow, torch.nan)
