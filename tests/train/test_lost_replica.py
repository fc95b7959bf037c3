"""A step that loses a replica: what is computed already is kept, and the result has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.data.batch import Batch
from keepstep.parallel.mesh import build_mesh
from keepstep.resilience.survivors.replica import MembershipChangedError
from keepstep.resilience.survivors.siblings import Siblings
from keepstep.train.build import build_learner
from keepstep.train.elastic_step import ElasticStep
from keepstep.train.step import StepSignals
from tests.train.test_experts import EXPERTS
from tests.train.tiny_runs import TINY


class Survivor:
    """One of two replicas; the other one is lost in the first step, and this one finishes alone."""

    def __init__(self, lost_at: str) -> None:
        self._lost_at, self.shares = lost_at, [[0, 2], [0, 2, 1, 3]]
        self.changed_numbers = False
        self.siblings, self.make_group = Siblings(), None

    def share(self, _count: int) -> list[int]:
        return self.shares[0]

    def shared_numbers(self, count: int) -> NDArray[np.int64]:
        return np.zeros(count, np.int64)

    def raise_if_changed(self) -> None:
        pass

    def sum_(self, numbers: NDArray[np.int64]) -> None:
        if len(self.shares) > 1:
            self.shares.pop(0)
            self.changed_numbers = self._lost_at == "half of the sum"
            if self.changed_numbers:
                numbers[:] = 7
            raise MembershipChangedError

    def total(self, own: int) -> int:
        # With the other one's part of the targets.
        return own * len(self.shares)

    def commit(self, _step: int, _checksum: str) -> None:
        pass

    def relay(self, _facts: Callable[[], Mapping[str, Any]], _sums: Callable[[], Any]) -> None:
        pass


@pytest.fixture(params=[[], [*EXPERTS, "model.experts.bias_update_rate=0"]], ids=["dense", "experts"])
def step(request: pytest.FixtureRequest) -> Iterator[ElasticStep]:
    config = load_config(None, [*TINY, "reproducible=elastic", "model.dropout=0.1", *request.param]).config
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    learner = build_learner(config, build_mesh(check_layout(config, 1), "cpu"), device)
    assert isinstance(learner.step, ElasticStep)
    yield learner.step
    torch.distributed.destroy_process_group()


def batch(number: int) -> Batch:
    rows = np.random.default_rng(number).integers(0, 128, (2, 17))
    return Batch(rows[:, :-1], rows[:, 1:], positions=None, documents=None, first_sample=2 * number)


@pytest.mark.parametrize(("lost_at", "computed"), [("the start of the sum", 4), ("half of the sum", 6)])
def test_survivor_computes_only_what_is_missing(
    step: ElasticStep, lost_at: str, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    sums = step._sums

    def counted(each: Batch) -> torch.Tensor:
        seen.append(each.first_sample // 2)
        return sums(each)

    monkeypatch.setattr(step, "_sums", counted)
    # Without an update both tries start from the same weights.
    undisturbed = step.run([batch(number) for number in range(4)], 0.0, StepSignals(step=1))
    seen.clear()
    survivor = Survivor(lost_at)
    step.join(survivor)  # type: ignore[arg-type]
    with pytest.raises(MembershipChangedError):
        step.run([batch(0), batch(2)], 0.0, StepSignals(step=1))
    numbers = step.run([batch(number) for number in survivor.share(4)], 0.0, StepSignals(step=1))
    assert len(seen) == computed
    # With experts also the numbers of tokens that each of them had.
    assert numbers.tolist() == undisturbed.tolist()
