"""Young–Daly, the exact formula and a simulation agree, and Llama 3's published time comes out."""

from __future__ import annotations

import pytest

from keepstep.plan.cluster import LLAMA3_FAILURES_PER_GPU_HOUR
from keepstep.plan.goodput import (
    Recovery,
    best_interval_s,
    effective_share,
    known_recoveries,
    llama3_share,
    mtbf_s,
    simulate,
    young_daly_s,
)

LLAMA3_MTBF_S = 54 * 86400 / 419


@pytest.mark.parametrize(("stall_s", "restart_s", "lost"), [(2, 600, 0.111), (0.1, 30, 0.010)])
def test_goodput_of_16384_gpus(stall_s: float, restart_s: float, lost: float) -> None:
    mean_s = 1.8 * 3600
    share = effective_share(young_daly_s(stall_s, mean_s), Recovery(stall_s, restart_s), mean_s)
    assert 1 - share == pytest.approx(lost, abs=0.001)


@pytest.mark.parametrize("recovery", [Recovery(10, 600), Recovery(2, 600), Recovery(0.3, 60), Recovery(0.3, 60, 30)])
def test_formula_and_simulation_agree(recovery: Recovery) -> None:
    interval_s = best_interval_s(recovery, LLAMA3_MTBF_S)
    exact = effective_share(interval_s, recovery, LLAMA3_MTBF_S)
    assert simulate(interval_s, recovery, LLAMA3_MTBF_S, failures=50_000) == pytest.approx(exact, abs=0.004)


def test_young_daly_interval_is_best_in_simulation() -> None:
    recovery = Recovery(10, 600)
    best = simulate(best_interval_s(recovery, LLAMA3_MTBF_S), recovery, LLAMA3_MTBF_S)
    others = [simulate(interval_s, recovery, LLAMA3_MTBF_S) for interval_s in (100, 250, 900, 2000, 5000)]
    assert best > max(others) - 0.002


def test_llama_3_trained_more_than_90_percent_of_the_time() -> None:
    assert mtbf_s(LLAMA3_FAILURES_PER_GPU_HOUR, 16384) == pytest.approx(LLAMA3_MTBF_S)
    common, ours = known_recoveries()["common"], known_recoveries()["keepstep"]
    assert 0.90 < llama3_share(common) < 0.95
    assert llama3_share(ours) > llama3_share(common)


def test_a_save_never_counts_before_it_is_written() -> None:
    assert best_interval_s(Recovery(0.1, 60, lag_s=600), 3600) >= 600
