"""Order is a pure function of (seed, global sample index), and every epoch visits every sample once."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.data.order import permute, sample_order

seeds = st.integers(0, 2**63)


@given(samples=st.integers(1, 5000), seed=seeds, epoch=st.integers(0, 2**40))
@settings(max_examples=60)
def test_every_epoch_visits_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    order = sample_order(samples * epoch, samples, samples, seed, shuffle=True)
    assert np.array_equal(np.sort(order), np.arange(samples))


@given(
    samples=st.integers(1, 500), seed=seeds, first=st.integers(0, 3000), cuts=st.lists(st.integers(1, 60), max_size=9)
)
@settings(max_examples=60)
def test_any_way_of_asking_gives_the_same_order(samples: int, seed: int, first: int, cuts: list[int]) -> None:
    at_once = sample_order(first, sum(cuts), samples, seed, shuffle=True)
    pieces = [
        sample_order(first + sum(cuts[:number]), cut, samples, seed, shuffle=True) for number, cut in enumerate(cuts)
    ]
    assert at_once.tolist() == [one for piece in pieces for one in piece.tolist()]


def test_epochs_and_seeds_differ() -> None:
    indices = np.arange(1000)
    orders = {tuple(permute(indices, 1000, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_looks_random() -> None:
    order = permute(np.arange(100_000), 100_000, 3, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_a_far_sample_costs_what_a_near_one_costs() -> None:
    sample_order(0, 8, 10**12, 1, shuffle=True)
    start_s = time.thread_time()
    order = sample_order(10**15 + 5, 8, 10**12, 1, shuffle=True)
    assert time.thread_time() - start_s < 0.05
    assert len(set(order.tolist())) == 8


def test_without_shuffling_the_order_on_disk_stays() -> None:
    assert sample_order(3, 6, 5, 1, shuffle=False).tolist() == [3, 4, 0, 1, 2, 3]


@given(samples=st.integers(1, 3000), window=st.integers(1, 400), seed=seeds)
@settings(max_examples=60)
def test_windows_visit_every_sample_once_and_stay_together(samples: int, window: int, seed: int) -> None:
    order = sample_order(samples * 3, samples, samples, seed, shuffle=True, window=window)
    assert np.array_equal(np.sort(order), np.arange(samples))
    if window < samples:
        owners = order // window
        assert np.count_nonzero(np.diff(owners)) == owners.max()
