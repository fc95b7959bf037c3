"""The model of replicas that survive: against a simulation, against published figures, and where spares pay."""

from __future__ import annotations

import heapq
import json
import random
from math import ceil, exp, log

import pytest

from keepstep.core.units import format_seconds
from keepstep.plan.cluster import LLAMA3_FAILURES_PER_GPU_HOUR
from keepstep.plan.goodput import Recovery, known_recoveries
from keepstep.plan.survival import SCALES, Replica, plan_scales, plan_survival, survival_share
from tests.doc_blocks import ROOT

HOUR_S = 3600.0


def simulated_share(
    replica: Replica, replicas: int, spares: int, rate: float, recovery: Recovery, failures: int = 40_000
) -> float:
    """Replica by replica, from event to event: nothing moves in a stall, and lost micro batches are dealt out."""
    draw = random.Random(5)
    mean_s = 1 / (rate * replica.gpus)
    loss_s, join_s = recovery.replica_stall_s + replica.step_s, recovery.join_stall_s
    events = [(draw.expovariate(1 / mean_s), "loss") for _ in range(replicas + spares)]
    heapq.heapify(events)
    well, now, stalled_until, worked_s, losses = replicas + spares, 0.0, 0.0, 0.0, 0
    while losses < failures:
        at, kind = heapq.heappop(events)
        members = min(well, replicas)
        if members:
            speed = replica.microbatches / ceil(replicas * replica.microbatches / members)
            worked_s += speed * max(0.0, at - max(now, stalled_until))
        now = at
        if kind == "loss":
            losses += 1
            # A spare that dies stops nobody.
            if draw.random() < members / well:
                stalled_until = max(stalled_until, now + loss_s + (join_s if well > replicas else 0.0))
            well -= 1
            heapq.heappush(events, (now + recovery.restart_s, "return"))
        else:
            if well < replicas:
                stalled_until = max(stalled_until, now + join_s)
            well += 1
            heapq.heappush(events, (now + draw.expovariate(1 / mean_s), "loss"))
    return worked_s / now * replicas / (replicas + spares)


@pytest.mark.parametrize(
    ("replicas", "spares", "microbatches", "restart_s"),
    [(20, 0, 8, 600.0), (20, 2, 8, 600.0), (20, 2, 1, 600.0), (100, 5, 2, 1800.0), (4, 1, 3, 60.0)],
)
def test_survival_formula_and_simulation_agree(replicas: int, spares: int, microbatches: int, restart_s: float) -> None:
    replica = Replica(gpus=8, microbatches=microbatches, step_s=5.0)
    recovery = Recovery(stall_s=0.0, restart_s=restart_s, replica_stall_s=10.0, join_stall_s=4.0)
    rate = 1 / (8 * 12 * HOUR_S)
    exact = survival_share(replica, replicas, spares, rate, recovery, save_interval_s=100.0)
    simulated = simulated_share(replica, replicas, spares, rate, recovery)
    assert exact == pytest.approx(simulated, abs=0.004)
    # The agreement means something: failures cost more than the tolerance.
    assert exact < replicas / (replicas + spares) - 0.0005


def test_both_figures_of_ft_hsdp_follow_from_one_failure_rate() -> None:
    """Meta reports 80% with a stall of 3 minutes, and 44% with restarts of 10 minutes, on about 100,000 GPUs."""
    mean_s = -180 / log(0.80)
    assert exp(-600 / mean_s) == pytest.approx(0.44, abs=0.05)
    replica = Replica(gpus=512, microbatches=64, step_s=1.0)
    recovery = Recovery(stall_s=1.0, restart_s=600.0, replica_stall_s=180.0)
    plan = plan_survival(replica, 100_000, 3600 / (mean_s * 100_000), recovery)
    assert plan is not None
    assert plan.restart_share == pytest.approx(0.44, abs=0.03)
    assert plan.survive_share == pytest.approx(0.80, abs=0.03)


@pytest.mark.parametrize("name", ["common", "keepstep"])
def test_survival_beats_restarts_at_every_scale(name: str) -> None:
    plans = plan_scales(Replica(64, 4, 10.0), 256, LLAMA3_FAILURES_PER_GPU_HOUR, known_recoveries()[name])
    assert [plan.gpus for plan in plans] == [256, *SCALES]
    for plan in plans:
        assert plan.restart_share < plan.survive_share <= plan.spares_share < 1
    gains = [plan.survive_share - plan.restart_share for plan in plans]
    assert gains == sorted(gains)


def test_spares_pay_where_losing_one_replica_slows_all() -> None:
    """With one micro batch each, any loss doubles the step; with many, dealing them out costs little."""
    few, many = (
        plan_survival(Replica(8, count, 10.0), 100_000, LLAMA3_FAILURES_PER_GPU_HOUR, known_recoveries()["common"])
        for count in (1, 256)
    )
    assert few is not None
    assert many is not None
    assert few.spares > many.spares
    assert few.spares_share > few.survive_share + 0.05


def test_planning_page_shows_the_formulas_figures() -> None:
    common, ours = (
        plan_scales(Replica(64, 4, 10.0), SCALES[0], LLAMA3_FAILURES_PER_GPU_HOUR, known_recoveries()[name])
        for name in ("common", "keepstep")
    )
    page = (ROOT / "docs" / "planning.md").read_text()
    for pair in zip(common, ours, strict=True):
        cells = [f"{pair[0].gpus:,}", format_seconds(pair[0].mtbf_s)]
        for plan in pair:
            spares = f"{plan.spares_share:.1%} ({plan.spares})" if plan.spares else "none"
            cells += [f"{plan.restart_share:.1%}", f"{plan.survive_share:.1%}", spares]
        assert f"| {' | '.join(cells)} |" in page


def test_survival_needs_two_replicas() -> None:
    assert plan_survival(Replica(1024, 1, 1.0), 1024, LLAMA3_FAILURES_PER_GPU_HOUR, Recovery(1, 60)) is None


def test_stalls_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "survive.json").read_text())
    recovery = known_recoveries()["keepstep"]
    assert recovery.replica_stall_s == pytest.approx(measured["stall_p99_s"] - measured["step_s"], abs=0.01)
    assert recovery.join_stall_s == pytest.approx(measured["join_stall_s"], abs=0.01)
